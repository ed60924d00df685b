"use strict";
(() => {
  const page = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const runSelect = document.getElementById("run");
  const phaseSelect = document.getElementById("phase");
  const drawn = new Map();

  // Steps travel as columns.
  const rowsOf = (columns) => {
    const names = Object.keys(columns);
    return names.length ? columns[names[0]].map((_, i) => Object.fromEntries(names.map((n) => [n, columns[n][i]]))) : [];
  };

  const dark = () => root.dataset.theme
    ? root.dataset.theme === "dark"
    : window.matchMedia("(prefers-color-scheme: dark)").matches;

  const config = () => {
    const text = dark() ? "#c9d1d9" : "#333a42";
    const line = dark() ? "#2c343c" : "#e3e7eb";
    return {
      view: { stroke: "transparent" },
      axis: { labelColor: text, titleColor: text, gridColor: line, domainColor: line, tickColor: line, titleFontWeight: "normal" },
      legend: { labelColor: text, titleColor: text },
      title: { color: text },
      range: {
        category: dark()
          ? ["#56b4e9", "#f08a4b", "#3fc79a", "#e38cc0", "#e69f00", "#9db4ff", "#b0b8c0"]
          : ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555"],
      },
    };
  };

  const datasets = (element) => {
    if (element.dataset.of !== "run") return page.shared;
    const run = page.runs[Number(runSelect.value)];
    return { ...run, steps: rowsOf(run.steps) };
  };

  const named = (spec) => [
    ...(spec.data && spec.data.name ? [spec.data.name] : []),
    ...(spec.vconcat || []).flatMap(named),
  ];

  const specFor = (element) => {
    const spec = structuredClone(page.specs[element.dataset.chart]);
    const data = datasets(element);
    // A panel without a row says nothing; it is left out.
    if (spec.vconcat) {
      spec.vconcat = spec.vconcat.filter((panel) => data[panel.data.name].length);
      const width = Math.max(element.clientWidth - 70, 160);
      // All panels end where the longest does, so that a moment lies at one place in all of them.
      const times = spec.vconcat.flatMap((panel) => data[panel.data.name].flatMap((row) => [row.t, row.t2 ?? row.t]));
      const end = times.reduce((latest, time) => Math.max(latest, time), 0);
      spec.vconcat.forEach((panel) => {
        panel.width = width;
        const scale = panel.encoding.x.scale;
        if (!scale.domain) scale.domain = [0, end];
      });
    }
    const names = [...new Set(named(spec))];
    spec.datasets = Object.fromEntries(names.map((name) => [name, data[name]]));
    element.dataset.rows = names.reduce((sum, name) => sum + data[name].length, 0);
    return spec;
  };

  const draw = async (element) => {
    const before = drawn.get(element);
    if (before) before.finalize();
    element.replaceChildren();
    element.classList.remove("failed");
    const spec = specFor(element);
    element.dataset.width = element.clientWidth;
    if (element.dataset.rows === "0") {
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
      if (element.dataset.chart === "surface") {
        await result.view.signal("phase_shown", phaseSelect.value).runAsync();
      }
      element.dataset.state = "drawn";
    } catch (error) {
      element.classList.add("failed");
      element.dataset.state = "failed";
      element.textContent = `This chart could not be drawn: ${error.message}`;
      throw error;
    }
  };

  const charts = [...document.querySelectorAll(".chart")];
  const drawAll = (which) => charts.filter(which).reduce((last, each) => last.then(() => draw(each)), Promise.resolve());

  const chooseRun = () => {
    const run = page.runs[Number(runSelect.value)];
    const phases = [...new Set(run.surface.map((row) => row.phase))];
    phaseSelect.replaceChildren(...phases.map((name) => new Option(name, name)));
    phaseSelect.closest("p").hidden = phases.length < 2;
    document.getElementById("about-steps").textContent = run.steps_left_out
      ? `The zoom holds the first steps only; ${run.steps_left_out.toLocaleString("en")} later ones are left out.`
      : "";
  };

  runSelect.addEventListener("change", () => { chooseRun(); drawAll((each) => each.dataset.of === "run"); });
  phaseSelect.addEventListener("change", () => drawAll((each) => each.dataset.chart === "surface"));

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

  chooseRun();
  drawAll(() => true).then(
    () => { root.dataset.ready = "yes"; },
    (error) => { root.dataset.ready = "failed"; console.error(error); },
  );
})();
