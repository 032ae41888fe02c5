// A link to what is seen: the page keeps its state behind the # of its address, and shows it when it is opened there.

const REMEMBER_DELAY = 200; // milliseconds; browsers refuse an address that changes too often
const linked = new URLSearchParams(location.hash.slice(1));
const restorers = [];
let rememberTimer = 0;

/** Keep a part of the state in the address; an empty value takes it out. */
function remember(key, value) {
  if (value === null || value === "") linked.delete(key);
  else linked.set(key, value);
  clearTimeout(rememberTimer);
  rememberTimer = setTimeout(() => history.replaceState(null, "", `#${linked}`), REMEMBER_DELAY);
}

/** Call a function with a part of the state when the page is built, if the address has it. */
function restored(key, restore) {
  restorers.push(() => linked.has(key) && restore(linked.get(key)));
}

/** Show the state of the address, once; another address of the same page is opened anew. */
function restoreAll() {
  for (const restore of restorers) restore();
  window.addEventListener("hashchange", () => location.reload());
}
