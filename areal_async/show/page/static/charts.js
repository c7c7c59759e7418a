"use strict";
// Series of runs, and the charts that draw them. Work that was done again from some x on replaces what was there from
// that x on.
const Charts = (() => {
  const DASHES = [[], [8, 4], [2, 4]], STYLES = ["", "dashed", "dotted"], COLOURS = 8, MANY = 20;

  class Store {
    constructor() { this.series = new Map(); this.changed = new Set(); }
    clear() { this.series.clear(); this.changed.clear(); }
    add(rows) {
      for (const [policy, x, , figures] of rows) {
        for (const [name, y] of Object.entries(figures)) {
          const key = JSON.stringify([policy, name]);
          let line = this.series.get(key);
          if (!line) this.series.set(key, (line = { policy, name, x: [], y: [] }));
          put(line, x, y);
          this.changed.add(name);
        }
      }
    }
    points() { let n = 0; for (const line of this.series.values()) n += line.x.length; return n; }
    last(name) {
      for (const line of this.series.values()) if (line.name === name && line.y.length) return line.y[line.y.length - 1];
      return null;
    }
  }

  // The number of the first of sorted values that is not below `x`.
  function place(xs, x) {
    let low = 0, high = xs.length;
    while (low < high) { const middle = (low + high) >> 1; if (xs[middle] < x) low = middle + 1; else high = middle; }
    return low;
  }

  function put(line, x, y) {
    if (line.x.length && x <= line.x[line.x.length - 1]) line.x.length = line.y.length = place(line.x, x);
    line.x.push(x); line.y.push(y);
  }

  // The lines of one panel over all runs: each with the label, the number of its colour and the style of its stroke.
  function linesOf(panel, runs) {
    const found = [], several = runs.length > 1;
    runs.forEach((run, number) => {
      const policies = new Set([...run.store.series.values()].map((line) => line.policy).filter(Boolean));
      let within = 0;
      for (const [pattern, label] of Object.entries(panel.series)) {
        const prefix = pattern.endsWith("*") ? pattern.slice(0, -1) : null;
        for (const line of run.store.series.values()) {
          if (prefix === null ? line.name !== pattern : !line.name.startsWith(prefix)) continue;
          const words = [prefix === null ? label : label + line.name.slice(prefix.length)];
          if (line.policy && policies.size > 1) words.unshift(line.policy);
          if (several) words.unshift(run.name);
          const colour = (several ? number : within) % COLOURS;
          const style = several ? within % STYLES.length : Math.floor(within / COLOURS) % STYLES.length;
          found.push({ line, label: words.join(" · "), colour, style });
          within += 1;
        }
      }
      if (panel.bound && run.bound !== null && run.bound !== undefined && found.length && !several) {
        const longest = found.reduce((a, b) => (a.line.x.length >= b.line.x.length ? a : b)).line.x;
        const x = [longest[0], longest[longest.length - 1]];
        found.push({ line: { x, y: [run.bound, run.bound] }, label: "bound η", colour: 7, style: 1 });
      }
    });
    return found;
  }

  function rolling(y) {
    const window = Math.max(5, Math.floor(y.length / 20)), sums = [0], half = window >> 1;
    for (const value of y) sums.push(sums[sums.length - 1] + value);
    return y.map((_, i) => {
      const low = Math.max(0, i - half), high = Math.min(y.length, i + window - half);
      return (sums[high] - sums[low]) / (high - low);
    });
  }

  const short = (value) => {
    if (value === null || value === undefined || !Number.isFinite(value)) return "–";
    const size = Math.abs(value);
    if (size >= 1e6 || (size && size < 1e-3)) return value.toExponential(2);
    if (size >= 1000) return Math.round(value).toLocaleString("en");
    return String(Number(value.toPrecision(4)));
  };

  class Chart {
    constructor(panel) {
      this.panel = panel; this.hidden = new Set(); this.shape = ""; this.plot = null; this.near = false; this.late = null;
      this.root = node("figure");
      this.root.hidden = true;
      const caption = node("figcaption");
      caption.append(node("h3", panel.title), node("span", panel.unit));
      this.area = node("div", "", "plot");
      this.area.tabIndex = 0;
      this.area.setAttribute("role", "img");
      this.legend = node("ul", "", "legend");
      this.root.append(caption, this.area, this.legend);
      this.area.addEventListener("keydown", (event) => this.key(event));
      new ResizeObserver(() => this.size()).observe(this.area);
      new IntersectionObserver((entries) => { this.near = entries.at(-1).isIntersecting; if (this.near && this.late) this.draw(...this.late); }, { rootMargin: "300px" }).observe(this.root);
    }

    // One that is far from the window is drawn when it comes near.
    draw(runs, smooth, now = false) {
      const lines = linesOf(this.panel, runs).filter((each) => each.line.x.length);
      this.root.hidden = !lines.length;
      if (!lines.length) return;
      this.late = this.near || now ? null : [runs, smooth];
      if (this.late) { this.tell(lines, null); return; }
      const shown = [], faint = [];
      for (const each of lines) {
        const soft = smooth && each.line.y.length >= MANY && each.label !== "bound η";
        if (soft) faint.push({ ...each, y: each.line.y, faint: true });
        shown.push({ ...each, y: soft ? rolling(each.line.y) : each.line.y, faint: false });
      }
      shown.unshift(...faint);
      this.lines = lines;
      const shape = JSON.stringify(shown.map((each) => [each.label, each.faint, each.colour, each.style, each.line.x.length < MANY]));
      const data = uPlot.join(shown.map((each) => [each.line.x, each.y]));
      if (shape === this.shape && this.plot) this.plot.setData(data);
      else { this.shape = shape; this.build(shown, data); }
      this.read();
    }

    build(shown, data) {
      if (this.plot) this.plot.destroy();
      this.legend.replaceChildren();
      this.values = new Map();
      const colours = new Map();
      for (const each of this.lines) {
        const button = node("button"), swatch = node("span", "", `swatch s${each.colour} ${STYLES[each.style]}`), value = node("b", "–");
        button.type = "button";
        button.append(swatch, node("span", each.label), value);
        button.setAttribute("aria-pressed", String(!this.hidden.has(each.label)));
        button.addEventListener("click", () => {
          if (!this.hidden.delete(each.label)) this.hidden.add(each.label);
          button.setAttribute("aria-pressed", String(!this.hidden.has(each.label)));
          this.plot.series.forEach((series, i) => { if (series.label === each.label) this.plot.setSeries(i, { show: !this.hidden.has(each.label) }); });
        });
        this.values.set(each.label, value);
        const item = node("li"); item.append(button); this.legend.append(item);
        colours.set(each.label, getComputedStyle(swatch).color);
      }
      const style = getComputedStyle(this.root), quiet = getComputedStyle(this.root.querySelector("figcaption span")).color;
      const axis = { stroke: quiet, font: "12px system-ui", grid: { stroke: style.borderTopColor, width: 1 }, ticks: { stroke: style.borderTopColor, width: 1 } };
      this.plot = new uPlot({
        width: Math.max(120, this.area.clientWidth), height: 210,
        legend: { show: false }, cursor: { y: false, drag: { x: true, y: false } },
        scales: { x: { time: false }, y: this.panel.share ? { range: (u, low, high) => [Math.min(0, low ?? 0), Math.max(high ?? 1, .05) * 1.05] } : {} },
        axes: [{ ...axis, size: 34, incrs: [1, 2, 5, 10, 20, 25, 50, 100, 200, 250, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 1e6] },
          { ...axis, size: (u, ticks) => 22 + 7 * Math.max(5, ...(ticks || []).map((tick) => tick.length)), values: (u, ticks) => ticks.map(short) }],
        series: [{ label: "step" }, ...shown.map((each) => ({
          label: each.label, stroke: each.faint ? faded(colours.get(each.label)) : colours.get(each.label), width: each.faint ? 1 : 2,
          dash: DASHES[each.style], spanGaps: true, show: !this.hidden.has(each.label),
          points: { show: !each.faint && each.line.x.length < MANY, size: 5 },
        }))],
        hooks: { setCursor: [() => this.read()] },
      }, data, this.area);
    }

    size() { if (this.plot && this.area.clientWidth) this.plot.setSize({ width: this.area.clientWidth, height: 210 }); }

    // The legend says the values at the cursor, or the last ones.
    read() {
      if (!this.plot) return;
      const at = this.plot.cursor.idx;
      const values = this.tell(this.lines, at === null || at === undefined ? null : this.plot.data[0][at]);
      this.lines.forEach((each, i) => { this.values.get(each.label).textContent = values[i]; });
    }

    tell(lines, x) {
      const words = [], values = [];
      for (const { label, line: { x: xs, y: ys } } of lines) {
        const after = x === null ? xs.length : place(xs, x), i = xs[after] === x ? after : Math.max(0, after - 1);
        values.push(short(ys[i]));
        words.push(`${label} ${short(ys[i])} at ${xs[i]}`);
      }
      this.area.setAttribute("aria-label", `${this.panel.title}, ${this.panel.unit}, over steps: ${words.join("; ")}`);
      return values;
    }

    key(event) {
      const moves = { ArrowLeft: -1, ArrowRight: 1 };
      if (!(event.key in moves) || !this.plot) return;
      event.preventDefault();
      const xs = this.plot.data[0], now = this.plot.cursor.idx ?? xs.length - 1;
      const next = Math.min(xs.length - 1, Math.max(0, now + moves[event.key] * (event.shiftKey ? 10 : 1)));
      this.plot.setCursor({ left: this.plot.valToPos(xs[next], "x"), top: 10 });
    }

    destroy() { if (this.plot) this.plot.destroy(); this.root.remove(); }
  }

  const faded = (colour) => colour.replace(/^rgb\((.*)\)$/, "rgba($1, .3)");

  function node(kind, text = "", name = "") {
    const made = document.createElement(kind);
    if (text !== "") made.textContent = text;
    if (name) made.className = name;
    return made;
  }

  return { Store, Chart, node, short };
})();
