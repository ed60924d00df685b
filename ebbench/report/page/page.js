"use strict";
(() => {
  const page = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const runSelects = [...document.querySelectorAll("select.run")];
  const phaseSelect = document.getElementById("phase");
  const caseSelect = document.getElementById("case"); // there where runs of several loads or environments are shown
  const charts = [...document.querySelectorAll(".chart")];
  const drawn = new Map();
  let chosen = 0; // the run shown
  let zoom = null; // seconds from and to which its single steps are shown; null is all of them

  // Steps travel as columns.
  const rowsOf = (columns) => {
    const names = Object.keys(columns);
    return names.length ? columns[names[0]].map((_, i) => Object.fromEntries(names.map((n) => [n, columns[n][i]]))) : [];
  };

  const dark = () => root.dataset.theme
    ? root.dataset.theme === "dark"
    : window.matchMedia("(prefers-color-scheme: dark)").matches;

  // Colours that are too dark on the dark page have another there.
  const shade = (colour) => (dark() ? page.on_dark[colour] ?? colour : colour);

  const config = () => {
    const text = dark() ? "#c9d1d9" : "#333a42";
    const line = dark() ? "#2c343c" : "#e3e7eb";
    return {
      view: { stroke: "transparent" },
      axis: { labelColor: text, titleColor: text, gridColor: line, domainColor: line, tickColor: line, titleFontWeight: "normal" },
      legend: { labelColor: text, titleColor: text, titleFontWeight: "normal" },
      title: { color: text },
    };
  };

  const datasets = (element) => {
    if (element.dataset.of !== "run") {
      const rows = page.shared[element.dataset.chart];
      return { [element.dataset.chart]: rows.filter((row) => !caseSelect || row.case === Number(caseSelect.value)) };
    }
    const run = page.runs[chosen];
    return { ...run, steps: rowsOf(run.steps), window: [{}] };
  };

  const named = (spec) => [
    ...(spec.data && spec.data.name ? [spec.data.name] : []),
    ...[...(spec.vconcat || []), ...(spec.layer || [])].flatMap(named),
  ];

  // Ticks where a reader expects them on a logarithmic axis, and enough of them.
  const ticksOf = (values) => {
    const low = values.reduce((a, b) => Math.min(a, b), Infinity);
    const high = values.reduce((a, b) => Math.max(a, b), 0);
    const decades = [...Array(14).keys()].map((power) => 10 ** (power - 5));
    const choices = [[1, 2, 5], [1, 1.5, 2, 3, 4, 5, 7], [...Array(36).keys()].map((i) => 1 + i / 4)].map((steps) =>
      decades.flatMap((unit) => steps.map((step) => unit * step)).filter((tick) => low <= tick && tick <= high));
    return choices.find((ticks) => ticks.length >= 4);
  };

  const panelWidth = (element) => Math.max(element.clientWidth - 70, 160);

  // The text in lines that a panel has room for, whatever the font: a longer title makes the whole page scroll sideways.
  const CHARACTER_PX = 7;
  const wrapped = (text, width) => text.split(" ").reduce((lines, word) => {
    const longer = [...lines.slice(-1), word].join(" ");
    const full = lines.length > 0 && longer.length * CHARACTER_PX > width;
    return full ? [...lines, word] : [...lines.slice(0, -1), longer];
  }, []);

  // Panels of one width over one axis of time that ends where the longest does; a panel without a row is left out.
  const fitPanels = (spec, data, element) => {
    spec.vconcat = spec.vconcat.filter((panel) => data[panel.layer[0].data.name].length);
    const width = panelWidth(element);
    const rows = spec.vconcat.flatMap((panel) => data[panel.layer[0].data.name]);
    const end = rows.reduce((latest, row) => Math.max(latest, row.t2 ?? row.t), 0);
    spec.vconcat.forEach((panel) => {
      panel.width = width;
      panel.title.text = wrapped(panel.title.text, width);
      panel.layer.forEach((layer) => { layer.encoding.x.scale = { nice: false, domain: [0, end] }; });
    });
    data.phases = data.phases.map((phase, i) => {
      const until = i + 1 < data.phases.length ? data.phases[i + 1].t : end;
      const room = ((until - phase.t) / end) * width - 8;
      return { ...phase, room, shown: room > 24 ? phase.label : "" };
    });
  };

  // A search's chart brings its own rows; its panels stand side by side where there is room.
  const fitSearch = (spec, element) => {
    const { hconcat, ...rest } = spec;
    const wide = element.clientWidth > 760;
    const width = wide ? (element.clientWidth - 240) / hconcat.length : panelWidth(element);
    const panels = hconcat.map((panel) => ({ ...panel, width }));
    element.dataset.rows = Object.values(spec.datasets ?? {}).flat().length || 1;
    return { ...rest, config: { legend: { orient: "top" } }, [wide ? "hconcat" : "vconcat"]: panels };
  };

  const specFor = (element) => {
    const text = JSON.stringify(page.specs[element.dataset.chart]);
    const spec = JSON.parse(text.replace(/#[0-9A-F]{6}/g, shade));
    if (element.dataset.of === "search") return fitSearch(spec, element);
    const data = datasets(element);
    if (spec.vconcat) fitPanels(spec, data, element);
    if (element.dataset.chart === "steps") spec.width = panelWidth(element);
    const values = windowOf(element);
    (spec.params ?? []).forEach((param) => { param.value = values[param.name] ?? param.value; });
    if (element.dataset.of !== "run") {
      const ticks = ticksOf(data[spec.data.name].map((row) => row.ms));
      spec.layer.forEach((layer) => {
        layer.encoding.x.axis.values = ticks;
        layer.encoding.color.scale = { domain: page.policies, range: page.colours.map(shade) };
      });
    }
    const names = [...new Set(named(spec))];
    spec.datasets = Object.fromEntries(names.map((name) => [name, data[name]]));
    element.dataset.rows = names.reduce((sum, name) => sum + (name === "window" ? 0 : data[name].length), 0);
    return spec;
  };

  const draw = async (element) => {
    const before = drawn.get(element);
    if (before) before.finalize();
    element.replaceChildren();
    element.classList.remove("failed");
    const spec = specFor(element);
    element.dataset.width = element.clientWidth;
    const empty = element.dataset.rows === "0";
    element.hidden = empty && element.dataset.of !== "run";  // answers without tokens have no TTFT, TPOT and ITL
    if (empty) {
      element.textContent = "Nothing was recorded for this.";
      element.dataset.state = "empty";
      return;
    }
    try {
      const actions = { export: true, source: false, compiled: false, editor: false };
      const tooltip = { theme: dark() ? "dark" : "light" };
      const options = { ast: true, actions, config: config(), renderer: "canvas", tooltip };
      const result = await window.vegaEmbed(element, spec, options);
      drawn.set(element, result);
      const { view } = result;
      if (element.dataset.chart === "surface") await view.signal("phase_shown", phaseSelect.value).runAsync();
      if (element.dataset.chart === "timeline" && page.runs[chosen].modes.length) view.addSignalListener("brush", (_, range) => zoomTo(range.t));
      element.dataset.state = "drawn";
    } catch (error) {
      element.classList.add("failed");
      element.dataset.state = "failed";
      element.textContent = `This chart could not be drawn: ${error.message}`;
      throw error;
    }
  };

  const drawAll = (which) => charts.filter(which).reduce((last, each) => last.then(() => draw(each)), Promise.resolve());

  const stepSpan = () => {
    const { t, t2 } = page.runs[chosen].steps;
    return t && t.length ? [t[0], t2[t2.length - 1]] : [0, 0];
  };

  const inWindow = () => {
    const { t = [], t2 = [], phase = [] } = page.runs[chosen].steps;
    const [from, to] = zoom ?? stepSpan();
    return phase.filter((_, i) => t2[i] >= from && t[i] <= to);
  };

  // The parameters by which charts know the window, by chart.
  const windowOf = (element) => {
    const [from_s, to_s] = zoom ?? stepSpan();
    return {
      timeline: { from_s, to_s, zoomed: zoom ? 1 : 0 },
      steps: { from_s, to_s, few: inWindow().length < 300 ? 1 : 0 },
    }[element.dataset.chart] ?? {};
  };

  const showZoom = (element) => {
    const { view } = drawn.get(element);
    Object.entries(windowOf(element)).forEach(([name, value]) => view.signal(name, value));
    return view.runAsync();
  };

  const describeZoom = () => {
    const [from, to] = zoom ?? stepSpan();
    const digits = to - from < 1 ? 4 : 2;
    const kinds = new Map();
    inWindow().forEach((kind) => kinds.set(kind, (kinds.get(kind) ?? 0) + 1));
    const steps = [...kinds.values()].reduce((sum, n) => sum + n, 0);
    const parts = [...kinds].map(([kind, n]) => `${n.toLocaleString("en")} ${kind}`).join(", ");
    document.getElementById("about-zoom").textContent =
      `${from.toFixed(digits)} s to ${to.toFixed(digits)} s: ${steps.toLocaleString("en")} steps (${parts})`;
  };

  // Seconds from and to which single steps are shown, kept inside the run; nothing is a click, which chooses nothing.
  let pending = 0;
  const zoomTo = (range) => {
    if (!range) return;
    const [first, last] = stepSpan();
    const span = Math.min(Math.max(range[1] - range[0], 0.001), last - first);
    const from = Math.min(Math.max(range[0], first), last - span);
    zoom = span < last - first ? [from, from + span] : null;
    cancelAnimationFrame(pending);
    pending = requestAnimationFrame(() => {
      describeZoom();
      charts.filter((each) => ["timeline", "steps"].includes(each.dataset.chart) && drawn.has(each)).forEach(showZoom);
    });
  };

  const MOVES = {
    earlier: (from, to) => [from - (to - from) / 2, to - (to - from) / 2],
    later: (from, to) => [from + (to - from) / 2, to + (to - from) / 2],
    closer: (from, to) => [from + (to - from) / 4, to - (to - from) / 4],
    wider: (from, to) => [from - (to - from) / 2, to + (to - from) / 2],
    all: () => stepSpan(),
  };
  document.querySelectorAll("[data-zoom]").forEach((button) =>
    button.addEventListener("click", () => zoomTo(MOVES[button.dataset.zoom](...(zoom ?? stepSpan())))));

  const chooseRun = (place) => {
    chosen = place;
    zoom = null;
    runSelects.forEach((select) => { select.value = String(place); });
    const run = page.runs[chosen];
    const phases = [...new Set(run.surface.map((row) => row.phase))];
    const before = phaseSelect.value;
    phaseSelect.replaceChildren(...phases.map((name) => new Option(name, name)));
    if (phases.includes(before)) phaseSelect.value = before;
    phaseSelect.closest("label").hidden = phases.length < 2;
    document.getElementById("about-steps").textContent = run.steps_left_out
      ? `Only the first steps are kept here; ${run.steps_left_out.toLocaleString("en")} later ones are left out.`
      : "";
    const starts = run.phases.map((phase) => `${phase.label} (${phase.t.toFixed(1)} s)`).join(", ");
    document.getElementById("about-phases").textContent = starts
      ? `Dashed lines mark where a phase of the scenario begins to be served: ${starts}.`
      : "";
    document.getElementById("single-steps").hidden = !Object.keys(run.steps).length;
    document.getElementById("about-drag").hidden = !run.modes.length;
    describeZoom();
  };

  runSelects.forEach((select) => select.addEventListener("change", () => {
    chooseRun(Number(select.value));
    drawAll((each) => each.dataset.of === "run");
  }));
  if (caseSelect) caseSelect.addEventListener("change", () => drawAll((each) => each.dataset.of !== "run"));
  if (phaseSelect) phaseSelect.addEventListener("change", () => drawAll((each) => each.dataset.chart === "surface"));

  // A shade on the right says that a table goes on there.
  document.querySelectorAll(".scroll").forEach((box) => {
    const mark = () => box.classList.toggle("more", box.scrollLeft + box.clientWidth < box.scrollWidth - 2);
    box.addEventListener("scroll", mark, { passive: true });
    new ResizeObserver(mark).observe(box);
  });

  document.getElementById("theme").addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    drawAll(() => true);
  });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawAll(() => true));

  let waiting = 0;
  window.addEventListener("resize", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => drawAll((each) => Number(each.dataset.width) !== each.clientWidth), 200);
  });

  // Sorting: numbers by value, texts by alphabet, what has no value last.
  const sortBy = (table, column, ascending) => {
    const body = table.tBodies[0];
    const key = (row) => row.cells[column].dataset.v;
    const numeric = [...body.rows].every((row) => key(row) === "" || !Number.isNaN(Number(key(row))));
    const compare = (a, b) => {
      const [x, y] = [key(a), key(b)];
      if (x === "" || y === "") return (x === "") - (y === "");
      const order = numeric ? Number(x) - Number(y) : x.localeCompare(y, "en", { numeric: true });
      return ascending ? order : -order;
    };
    body.append(...[...body.rows].sort(compare));
  };
  document.querySelectorAll("table.sortable").forEach((table) => {
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      head.firstElementChild.addEventListener("click", () => {
        const ascending = head.getAttribute("aria-sort") !== "ascending";
        [...table.tHead.rows[0].cells].forEach((cell) => cell.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", ascending ? "ascending" : "descending");
        sortBy(table, column, ascending);
      });
    });
  });

  // The run with the most to show over time comes first; a page of a trend has none.
  const panels = page.runs.map((run) => Object.values(run).filter((rows) => rows.length).length);
  if (panels.length) chooseRun(panels.indexOf(Math.max(...panels)));
  drawAll(() => true).then(
    () => { root.dataset.ready = "yes"; },
    (error) => { root.dataset.ready = "failed"; console.error(error); },
  );
})();
