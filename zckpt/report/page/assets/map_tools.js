// The choices above the map: which slots are drawn, and in which order the parameters stand.

/** Slots to tick; frozen and padding explained. */
function mapLegend(view) {
  const { model } = view;
  const choices = model.slots.map((slot, i) => {
    const box = element("input", { type: "checkbox", checked: true });
    box.addEventListener("change", () => {
      view.shown[i] = box.checked;
      view.changed({});
      remember("hidden", model.slots.filter((_, s) => !view.shown[s]).join(" "));
    });
    restored("hidden", (slots) => slots.split(" ").includes(slot) && box.click());
    const swatch = element("span", { class: "swatch", "data-slot": model.colours[i], "aria-hidden": "true" });
    return element("label", { class: "choice" }, box, swatch, slot);
  });
  const frozen = model.parameters.some((p) => p.kind === "frozen")
    ? element("span", { class: "choice" }, element("span", { class: "swatch frozen", "aria-hidden": "true" }), "frozen")
    : null;
  const padding = model.data.padding.length
    ? element("span", { class: "choice" }, element("span", { class: "swatch padding", "aria-hidden": "true" }), "padding")
    : null;
  return element("fieldset", { class: "legend" }, element("legend", { class: "unseen" }, "Slots shown in the map"), ...choices, frozen, padding);
}

/** By param group or as in the model; nothing where that is the same. */
function mapOrder(view) {
  if (!view.model.grouped) return null;
  const choice = element(
    "select",
    { id: "map-order" },
    element("option", { value: "groups" }, "by param group"),
    element("option", { value: "model" }, "as in the model"),
  );
  choice.addEventListener("change", () => {
    view.arrange(choice.value);
    remember("order", choice.value === "groups" ? null : choice.value);
  });
  restored("order", (order) => {
    choice.value = order === "model" ? order : "groups";
    view.arrange(choice.value);
  });
  return element("label", { class: "choice" }, "Parameters ", choice);
}
