// The search field: which names match, said aloud and told to every part of the page.

const SEARCH_DELAY = 60; // milliseconds, so that typing does not wait for drawing

/** Return a function of a name: all words are in it, whatever their case; in a word, * and ? stand for any text and character. */
function matcher(query) {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  const tests = words.map((word) => {
    if (!/[*?]/.test(word)) return (name) => name.includes(word);
    const pattern = word.replace(/[.+^${}()|[\]\\]/g, "\\$&").replace(/\*+/g, ".*").replace(/\?/g, ".");
    const expression = new RegExp(pattern);
    return (name) => expression.test(name);
  });
  return (name) => tests.every((test) => test(name));
}

/** Wire the field up. `names` are lower-cased once; listeners of "search" get { query, matches: Uint8Array or null, count }. */
function startSearch(names, noun) {
  const field = document.getElementById("search");
  const answer = document.getElementById("search-answer");
  const lower = names.map((name) => name.toLowerCase());
  let timer = 0;
  let first = -1;

  function run() {
    const query = field.value.trim();
    answer.dataset.query = query;
    first = -1;
    if (!query) {
      answer.textContent = "";
      tell("search", { query, matches: null, count: names.length });
      return;
    }
    const test = matcher(query);
    const matches = new Uint8Array(lower.length);
    let count = 0;
    for (let i = 0; i < lower.length; i += 1) {
      if (test(lower[i])) {
        matches[i] = 1;
        count += 1;
        if (first < 0) first = i;
      }
    }
    answer.textContent = count
      ? `${whole(count)} of ${plural(names.length, noun)} ${count === 1 ? "matches" : "match"}`
      : `No ${noun} matches`;
    tell("search", { query, matches, count });
  }

  when("search", ({ query }) => remember("search", query));
  restored("search", (query) => {
    field.value = query;
    run();
  });
  when("choose", ({ index }) => remember("chosen", names[index]));
  restored("chosen", (name) => names.includes(name) && tell("choose", { index: names.indexOf(name) }));

  field.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(run, SEARCH_DELAY);
  });
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && field.value) {
      field.value = "";
      event.preventDefault();
      run();
    } else if (event.key === "Enter") {
      clearTimeout(timer);
      run();
      if (first >= 0) tell("choose", { index: first });
    }
  });
  field.form.addEventListener("submit", (event) => event.preventDefault());
  document.addEventListener("keydown", (event) => {
    const typing = event.target.closest("input, select, textarea");
    if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey && !event.altKey) {
      event.preventDefault();
      field.focus();
      field.select();
    }
  });
}
