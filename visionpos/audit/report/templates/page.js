"use strict";
(() => {
  // Theme: the system's choice until the button is pressed; kept where the browser lets a file keep something.
  const root = document.documentElement, button = document.getElementById("theme");
  const kept = { get: () => { try { return localStorage.getItem("visionpos-theme"); } catch { return null; } },
    set: (value) => { try { localStorage.setItem("visionpos-theme", value); } catch { /* a private window */ } } };
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => root.dataset.theme ? root.dataset.theme === "dark" : system.matches;
  const show = () => button.setAttribute("aria-pressed", String(isDark()));
  const first = kept.get();
  if (first === "dark" || first === "light") root.dataset.theme = first;
  button.hidden = false;
  button.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; kept.set(root.dataset.theme); show(); });
  system.addEventListener("change", show);
  show();

  // Filters: a select named x keeps what has its value among the lines of data-x; a search keeps what has all its words.
  for (const form of document.querySelectorAll("form.filters[data-for]")) {
    const items = [...document.querySelectorAll(`#${form.dataset.for} [data-item]`)];
    const count = form.querySelector("output"), empty = document.getElementById(`${form.dataset.for}-empty`);
    const lists = new Map(items.map((item) => [item, new Map(Object.entries(item.dataset).map(([key, value]) => [key, value.split("\n")]))]));
    const texts = new Map();
    const text = (item) => { if (!texts.has(item)) texts.set(item, item.textContent.toLowerCase()); return texts.get(item); };
    const apply = () => {
      const chosen = [...form.querySelectorAll("select")].filter((select) => select.value !== "");
      const words = [...form.querySelectorAll("input[type=search]")].flatMap((input) => input.value.toLowerCase().split(/\s+/).filter(Boolean));
      let shown = 0;
      for (const item of items) {
        const fits = chosen.every((select) => (lists.get(item).get(select.name) ?? []).includes(select.value)) && words.every((word) => text(item).includes(word));
        item.hidden = !fits;
        shown += fits ? 1 : 0;
      }
      count.textContent = `${shown} of ${items.length} shown`;
      if (empty) empty.hidden = shown > 0;
    };
    form.hidden = false;
    form.addEventListener("input", apply);
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("reset", () => setTimeout(apply));
    // A link to an item that is filtered out shows all items again.
    const reveal = () => {
      const item = location.hash.length > 1 ? document.getElementById(decodeURIComponent(location.hash.slice(1))) : null;
      if (item && item.hidden && items.includes(item)) { form.reset(); apply(); item.scrollIntoView(); }
    };
    addEventListener("hashchange", reveal);
    apply();
  }
})();
