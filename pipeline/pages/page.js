// Adds to the page what anchors cannot: lineage, zoom, and finding steps. Without it the page shows
// the same; nothing here makes content.
"use strict";
(() => {
  const { keys, labels, parents } = JSON.parse(document.getElementById("graph").textContent);
  const dag = document.querySelector(".dag");
  const view = document.querySelector(".view");
  const boxes = dag ? [...dag.querySelectorAll(".box")] : [];
  const edges = dag ? [...dag.querySelectorAll(".edge")] : [];
  const children = keys.map(() => []);
  parents.forEach((above, i) => above.forEach((p) => children[p].push(i)));
  const picked = new Set();
  let words = "";
  let opened = -1;

  function reach(start, next) {
    const found = new Set([start]);
    for (const i of found) next[i].forEach((j) => found.add(j));
    return found;
  }

  function draw() {
    const up = opened < 0 ? null : reach(opened, parents);
    const down = opened < 0 ? null : reach(opened, children);
    const chosen = (i) =>
      (opened < 0 || up.has(i) || down.has(i)) &&
      (!picked.size || [...picked].some((state) => boxes[i].classList.contains(state))) &&
      labels[i].toLowerCase().includes(words);
    boxes.forEach((box, i) => {
      box.classList.toggle("self", i === opened);
      box.classList.toggle("faint", !chosen(i));
    });
    edges.forEach((edge) => {
      const from = Number(edge.dataset.from), to = Number(edge.dataset.to);
      const on = opened >= 0 && ((up.has(from) && up.has(to)) || (down.has(from) && down.has(to)));
      edge.classList.toggle("on", on);
      edge.classList.toggle("faint", !on && (opened >= 0 || !(chosen(from) && chosen(to))));
    });
  }

  function open() {
    const hash = decodeURIComponent(location.hash);
    const before = opened;
    opened = hash.startsWith("#step=") ? keys.indexOf(hash.slice(6)) : -1;
    draw();
    fit();
    if (opened >= 0) {
      document.getElementById(hash.slice(1)).focus({ preventScroll: true });
      reveal(boxes[opened]);
    } else if (before >= 0) boxes[before].focus({ preventScroll: true });
  }

  // Scrolls the picture, never the page.
  function reveal(box) {
    const a = box.getBoundingClientRect(), b = view.getBoundingClientRect();
    if (a.left < b.left || a.right > b.right) view.scrollLeft += a.left - b.left - b.width / 3;
    if (a.top < b.top || a.bottom > b.bottom) view.scrollTop += a.top - b.top - b.height / 3;
  }

  const size = dag && { width: dag.viewBox.baseVal.width, height: dag.viewBox.baseVal.height };
  let scale = 1;
  function zoom(to) {
    scale = Math.min(Math.max(to, 0.1), 4);
    dag.style.width = `${size.width * scale}px`;
    dag.style.height = `${size.height * scale}px`;
  }
  const fitting = () => Math.min(1, (view.clientWidth - 20) / size.width);
  let byHand = false;
  // Below 0.6 names cannot be read: then the picture scrolls.
  const fit = () => byHand || zoom(Math.max(fitting(), 0.6));
  const byHandTo = (to) => { byHand = true; zoom(to); };

  if (dag) {
    document.getElementById("smaller").onclick = () => byHandTo(scale / 1.25);
    document.getElementById("larger").onclick = () => byHandTo(scale * 1.25);
    document.getElementById("fit").onclick = () => byHandTo(fitting());
    view.addEventListener("wheel", (event) => {
      if (!event.ctrlKey) return;
      event.preventDefault();
      byHandTo(scale * Math.exp(-event.deltaY / 400));
    }, { passive: false });
    const find = document.getElementById("find");
    find.oninput = () => { words = find.value.trim().toLowerCase(); draw(); };
    find.onkeydown = (event) => {
      const first = labels.findIndex((label) => label.toLowerCase().includes(words));
      if (event.key === "Enter" && words && first >= 0)
        location.hash = `step=${encodeURIComponent(keys[first])}`;
    };
    document.querySelectorAll(".key").forEach((button) => {
      button.onclick = () => {
        const state = button.dataset.state;
        if (!picked.delete(state)) picked.add(state);
        button.setAttribute("aria-pressed", picked.has(state));
        draw();
      };
    });
    addEventListener("hashchange", open);
    addEventListener("load", open); // only now is the panel that the address names laid out
    addEventListener("resize", fit);
    addEventListener("keydown", (event) => {
      if (event.key === "Escape" && opened >= 0) location.hash = "";
    });
    open();
  }
  document.documentElement.dataset.ready = "yes";
})();
