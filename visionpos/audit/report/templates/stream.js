"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const board = document.getElementById("board"), facts = document.getElementById("token");
  const packed = document.querySelector("#filters select[name=document]") !== null;
  const count = data.name.length, tokens = new Array(count), sectionOf = new Array(count);
  const figures = [...document.querySelectorAll("figure[data-picture]")];
  const byPicture = figures.map(() => []);
  data.picture.forEach((picture, i) => { if (picture >= 0) byPicture[picture].push(i); });

  const title = (section) => (packed && section.document >= 0 ? `document ${section.document}, ` : "") + section.label;
  const groups = data.sections.map((section, number) => {
    const group = document.createElement("div"), head = document.createElement("p"), cells = document.createElement("div");
    group.id = `section-${number}`;
    group.className = "span" + (section.document >= 0 && packed ? ` tone-${section.document % 8}` : "");
    group.setAttribute("role", "group");
    group.setAttribute("aria-label", title(section));
    head.textContent = `${packed && section.document >= 0 ? `D${section.document} ` : ""}${number}: ${section.label}`;
    head.setAttribute("aria-hidden", "true");
    // Cells stand as on the picture, a row in a line; what parts rows stands behind them.
    cells.className = section.width ? "raster" : "cells";
    cells.setAttribute("role", "presentation");
    let line = cells;
    for (let i = section.start; i < section.stop; i++) {
      const token = document.createElement("div");
      token.className = data.cell[i] ? "token cell" : "token";
      token.setAttribute("role", "option");
      token.setAttribute("aria-selected", "false");
      token.tabIndex = -1;
      token.dataset.i = i;
      token.textContent = data.cell[i] ? i : data.names[data.name[i]];
      tokens[i] = token;
      sectionOf[i] = number;
      if (section.width && (line === cells || (data.cell[i] && data.cell[i][3] === 0))) {
        line = document.createElement("div");
        line.className = "row";
        line.setAttribute("role", "presentation");
        cells.append(line);
      }
      line.append(token);
    }
    group.append(head, cells);
    return group;
  });
  board.classList.toggle("long", count > 2000);
  board.append(...groups);

  const lines = (i) => {
    const section = data.sections[sectionOf[i]], cell = data.cell[i], rect = data.rect[i];
    const out = [["Token", `${i} of ${count}`], ["Name", data.names[data.name[i]]], ["Span", `${sectionOf[i]}: ${title(section)}`]];
    if (packed) out.push(["Document", data.document[i] < 0 ? "padding" : `D${data.document[i]}, token ${data.place[i]} of it`]);
    if (cell) out.push(["Cell", `view ${cell[0]}, time step ${cell[1]}, row ${cell[2]}, column ${cell[3]}`]);
    data.axes.forEach((axis, a) => out.push([`Id, ${axis}`, String(data.ids[a][i])]));
    if (rect) {
      const empty = rect[2] <= rect[0] || rect[3] <= rect[1];
      out.push(["Rectangle", empty ? "none: the token sees padding alone" : `rows ${rect[0]} to ${rect[2]}, columns ${rect[1]} to ${rect[3]} (pixels of the photo)`]);
    }
    return out;
  };

  let current = -1, tabbed = -1;
  const draw = (i) => {
    const picture = data.picture[i];
    for (const [at, figure] of figures.entries()) {
      if (picture >= 0) figure.hidden = at !== picture;
      const [top, left, bottom, right] = at === picture ? data.rect[i] : [0, 0, 0, 0];
      for (const box of figure.querySelectorAll(".hit, .under")) {
        box.setAttribute("x", left);
        box.setAttribute("y", top);
        box.setAttribute("width", Math.max(right - left, 0));
        box.setAttribute("height", Math.max(bottom - top, 0));
      }
    }
  };
  const choose = (i) => {
    if (i === current) return;
    if (current >= 0) tokens[current].setAttribute("aria-selected", "false");
    current = i;
    tokens[i].setAttribute("aria-selected", "true");
    const said = lines(i);
    tokens[i].setAttribute("aria-label", said.map(([key, value]) => `${key} ${value}`).join("; "));
    facts.replaceChildren(...said.flatMap(([key, value]) => {
      const dt = document.createElement("dt"), dd = document.createElement("dd");
      dt.textContent = key;
      dd.textContent = value;
      return [dt, dd];
    }));
    draw(i);
  };
  // One tab stop for all tokens: the one that was focused last, or the first that is shown.
  const stop = (i) => {
    if (tabbed >= 0) tokens[tabbed].tabIndex = -1;
    tabbed = i;
    if (i >= 0) tokens[i].tabIndex = 0;
  };
  const go = (i) => { choose(i); stop(i); tokens[i].focus(); };
  const shown = (number) => !groups[number].hidden;
  const seek = (i, step) => {
    while (i >= 0 && i < count && !shown(sectionOf[i])) i = step > 0 ? data.sections[sectionOf[i]].stop : data.sections[sectionOf[i]].start - 1;
    return i >= 0 && i < count ? i : -1;
  };
  const span = (i, step) => {
    let number = sectionOf[i] + step;
    while (number >= 0 && number < groups.length && !shown(number)) number += step;
    return number >= 0 && number < groups.length ? data.sections[number].start : -1;
  };
  const row = (i, step) => {
    const section = data.sections[sectionOf[i]], to = i + step * Math.max(section.width, 1);
    return to >= section.start && to < section.stop ? to : seek(step > 0 ? section.stop : section.start - 1, step);
  };
  const moves = {
    ArrowRight: (i) => seek(i + 1, 1), ArrowLeft: (i) => seek(i - 1, -1), ArrowDown: (i) => row(i, 1), ArrowUp: (i) => row(i, -1),
    PageDown: (i) => span(i, 1), PageUp: (i) => span(i, -1), Home: () => seek(0, 1), End: () => seek(count - 1, -1),
  };
  const tokenOf = (event) => { const found = event.target.closest(".token"); return found ? Number(found.dataset.i) : -1; };
  board.addEventListener("keydown", (event) => {
    const i = tokenOf(event), move = moves[event.key];
    if (i < 0 || !move || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    const to = move(i);
    if (to >= 0) go(to);
  });
  board.addEventListener("focusin", (event) => { const i = tokenOf(event); if (i >= 0) { choose(i); stop(i); } });
  board.addEventListener("pointerover", (event) => { const i = tokenOf(event); if (i >= 0) choose(i); });
  board.addEventListener("click", (event) => { const i = tokenOf(event); if (i >= 0) go(i); });

  // The way back: a point of the photo chooses a token that looks at it; a click goes there.
  for (const [at, figure] of figures.entries()) {
    const sheet = figure.querySelector(".sheet"), box = figure.querySelector("svg").viewBox.baseVal;
    const under = (event) => {
      const place = sheet.getBoundingClientRect();
      const x = (event.clientX - place.left) / place.width * box.width, y = (event.clientY - place.top) / place.height * box.height;
      return byPicture[at].find((i) => shown(sectionOf[i]) && data.rect[i][0] <= y && y < data.rect[i][2] && data.rect[i][1] <= x && x < data.rect[i][3]);
    };
    sheet.addEventListener("pointermove", (event) => { const i = under(event); if (i !== undefined) choose(i); });
    sheet.addEventListener("click", (event) => { const i = under(event); if (i !== undefined) go(i); });
  }

  // The table of spans is what the filters hide; the tokens follow it.
  const form = document.getElementById("filters"), rows = [...document.querySelectorAll("#spans [data-item]")];
  const follow = () => {
    rows.forEach((item, number) => { groups[number].hidden = item.hidden; });
    if (tabbed < 0 || !shown(sectionOf[tabbed])) stop(count ? seek(0, 1) : -1);
  };
  form.addEventListener("input", follow);
  form.addEventListener("reset", () => setTimeout(() => setTimeout(follow)));
  const wanted = document.getElementById("goto");
  wanted.addEventListener("change", () => {
    const i = Math.round(Number(wanted.value));
    if (wanted.value === "" || !(i >= 0 && i < count)) return;
    if (!shown(sectionOf[i])) { for (const field of form.querySelectorAll("select, input[type=search]")) field.value = ""; form.dispatchEvent(new Event("input")); }
    go(i);
  });
  follow();
})();
