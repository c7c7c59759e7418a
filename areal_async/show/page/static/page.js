"use strict";
// The page: what is asked of the server when, and where it is shown. With data in the file itself it is a report.
(() => {
  const { Store, Chart, node, short } = Charts;
  const by = (id) => document.getElementById(id);
  const EVERY_MS = 2000, PIECE = 100;
  const given = by("data") ? JSON.parse(by("data").textContent) : null;
  let timer = 0, view = null;

  // --- theme ---------------------------------------------------------------------------------------------------
  const kept = (name, value) => { try { if (value === undefined) return sessionStorage.getItem(name); sessionStorage.setItem(name, value); } catch { /* a file without storage */ } return null; };
  const setTheme = (value) => { if (value) document.documentElement.dataset.theme = value; else delete document.documentElement.dataset.theme; if (view?.charts) view.charts.forEach((chart) => { chart.shape = ""; }), view.draw(true); };
  by("theme").value = kept("theme") || "";
  by("theme").addEventListener("change", () => { kept("theme", by("theme").value); setTheme(by("theme").value); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setTheme(by("theme").value));
  by("skip").addEventListener("click", (event) => { event.preventDefault(); by("main").focus(); });

  // --- the server ----------------------------------------------------------------------------------------------
  class Refused extends Error {}
  async function ask(path, values = {}) {
    const query = new URLSearchParams(values).toString(), token = kept("token"), url = `v1/page/jobs${path}${query ? `?${query}` : ""}`;
    const headers = {};
    if (token) headers.authorization = `Bearer ${token}`;
    const answer = await fetch(url, { headers, cache: "no-store" });
    if (answer.status === 401) throw new Refused(token ? "This token is not let in." : "");
    if (!answer.ok) throw new Error((await answer.json().catch(() => ({}))).error || `the server answered ${answer.status}`);
    return answer.json();
  }
  const trouble = (text) => { if (by("trouble").textContent !== text) by("trouble").textContent = text; by("trouble").hidden = !text; };

  if (!given && location.hash.startsWith("#token=")) {
    kept("token", decodeURIComponent(location.hash.slice(7)));
    history.replaceState(null, "", "#/");
  }
  by("login-form").addEventListener("submit", (event) => {
    event.preventDefault();
    kept("token", by("token").value.trim());
    by("token").value = "";
    route();
  });

  // --- views ---------------------------------------------------------------------------------------------------
  function only(name) { for (const id of ["login", "jobs", "job"]) by(id).hidden = id !== name; }

  class JobList {
    // Of many jobs those near the window alone are in the page; more come as the end of the list comes near.
    constructor() {
      this.rows = new Map(); this.most = PIECE; this.shown = [];
      by("jobs-find").oninput = () => { this.most = PIECE; this.filter(); };
      this.end = new IntersectionObserver((entries) => {
        if (entries.at(-1).isIntersecting && this.most < this.rows.size) { this.most += PIECE; this.filter(); }
      }, { rootMargin: "1500px" });
      this.end.observe(by("jobs-end"));
    }
    async look() {
      const jobs = await ask("");
      if (view !== this) return;
      if (jobs.length === 1 && !this.rows.size) { location.replace(`#/job/${encodeURIComponent(jobs[0].key)}`); return; }
      this.rows = new Map(jobs.map((job) => [job.key, this.row(this.rows.get(job.key), job)]));
      this.filter();
    }
    row(row, job) {
      if (!row) {
        const item = node("li"), link = node("a", "", "job"), cells = Array.from({ length: 5 }, () => node("span"));
        link.href = `#/job/${encodeURIComponent(job.key)}`;
        link.append(...cells);
        item.append(link);
        row = { item, cells, find: "" };
      }
      [job.name, job.state, `step ${job.step}`, short(job.reward), short(job.accuracy)].forEach((text, i) => { if (row.cells[i].textContent !== text) row.cells[i].textContent = text; });
      row.cells[1].className = `state ${job.state}`;
      row.find = `${job.name} ${job.state}`.toLowerCase();
      return row;
    }
    filter() {
      const wanted = by("jobs-find").value.trim().toLowerCase(), fits = [...this.rows.values()].filter((row) => row.find.includes(wanted));
      const shown = fits.slice(0, this.most).map((row) => row.item);
      if (shown.length !== this.shown.length || shown.some((item, i) => item !== this.shown[i])) {
        const focused = document.activeElement;
        by("jobs-list").replaceChildren(...(this.shown = shown));
        if (by("jobs-list").contains(focused)) focused.focus();
        // Asked anew: an end that stays in view while the list grows is told of once only.
        this.end.unobserve(by("jobs-end"));
        this.end.observe(by("jobs-end"));
      }
      by("jobs-count").textContent = `${fits.length} of ${this.rows.size}`;
    }
    show() { only("jobs"); by("crumb").textContent = ""; by("jobs-list").replaceChildren(); document.title = "Jobs · areal-async"; }
    close() { this.end.disconnect(); }
  }

  class Charted {
    // What a job's view and a report have in common. `runs` have `name`, `bound` and `store`.
    constructor(runs) {
      this.runs = runs; this.charts = [];
      by("charts").replaceChildren();
      by("sample-shown").replaceChildren(); by("sample-list").replaceChildren(); by("samples").hidden = true; by("workers").hidden = true;
      by("smooth").onchange = () => this.draw(true);
    }
    draw(all = false, now = false) {
      const changed = new Set(this.runs.flatMap((run) => [...run.store.changed]));
      for (const run of this.runs) run.store.changed.clear();
      for (const chart of this.charts) {
        const fits = (pattern) => (pattern.endsWith("*") ? [...changed].some((name) => name.startsWith(pattern.slice(0, -1))) : changed.has(pattern));
        if (all || Object.keys(chart.panel.series).some(fits)) chart.draw(this.runs, by("smooth").checked, now);
      }
    }
    panels(panels) {
      if (this.charts.length) return;
      this.charts = panels.map((panel) => new Chart(panel));
      by("charts").append(...this.charts.map((chart) => chart.root));
    }
    head(name, told) {
      by("job-title").textContent = name;
      by("job-state").textContent = told?.state || "";
      by("job-state").className = `state ${told?.state || ""}`;
      by("waits").hidden = !told?.waits;
      if (by("waits").textContent !== (told?.waits || "")) by("waits").textContent = told?.waits || "";
      document.title = `${name} · areal-async`;
    }
    tiles(told) {
      const status = told.status || {}, store = this.runs[0].store, per = (value) => (value === null || value === undefined ? null : `${short(value)}/s`);
      const at = (own, name) => (own === null || own === undefined ? store.last(name) : own);
      const staleness = at(status.staleness_mean, "staleness_mean");
      const entries = [
        ["Steps", told.steps === null ? null : `${told.step} of ${told.steps}`], ["Time left", told.alive && status.eta_s ? span(status.eta_s) : null],
        ["Reward", value(at(status.reward, "reward_mean"))], ["Held-out", value(at(status.accuracy, "accuracy"))],
        ["Staleness", staleness === null ? null : `${short(staleness)}, at most ${told.bound}`],
        ["Generated tokens", per(at(status.generated_per_s, "generated_per_s"))], ["Trained tokens", per(at(status.trained_per_s, "tokens_per_s"))],
        ["Groups", status.groups ? Object.entries(status.groups).filter(([, count]) => count).map(([state, count]) => `${count} ${state.toLowerCase()}`).join(", ") : null],
      ];
      by("tiles").replaceChildren(...entries.filter(([, text]) => text).map(([label, text]) => { const tile = node("div"); tile.append(node("dt", label), node("dd", text)); return tile; }));
    }
    workers(rows) {
      by("workers").hidden = !rows.length;
      const head = node("tr");
      for (const text of ["Process", "Is", "Busy", "Waits for"]) { const cell = node("th", text); cell.scope = "col"; head.append(cell); }
      const top = node("thead"), body = node("tbody");
      top.append(head);
      for (const row of rows) {
        const line = node("tr"), name = node("th", row.name), busy = node("td", "", "number");
        name.scope = "row";
        if (row.busy !== null && row.busy !== undefined) {
          const meter = node("meter");
          meter.value = row.busy;
          meter.setAttribute("aria-label", `${row.name} is busy`);
          busy.append(meter, `${Math.round(row.busy * 100)} %`);
        } else busy.textContent = "–";
        line.append(name, node("td", row.phase), busy, node("td", row.waiting_for || "nothing"));
        body.append(line);
      }
      by("workers-table").replaceChildren(top, body);
    }
    close() { for (const chart of this.charts) chart.destroy(); }
  }

  const value = (number) => (number === null || number === undefined ? null : short(number));
  const span = (seconds) => (seconds < 90 ? `${Math.round(seconds)} s` : seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`);

  class JobView extends Charted {
    constructor(key) {
      super([{ name: key, bound: null, store: new Store() }]);
      this.key = key; this.path = `/${encodeURIComponent(key)}`; this.offset = 0;
      this.viewer = new Samples.Viewer({
        list: () => ask(`${this.path}/samples`), summaries: (key) => ask(`${this.path}/samples`, { key }),
        episode: (key, episode) => ask(`${this.path}/samples`, { key, episode }), search: (search) => ask(`${this.path}/samples`, { search }),
      });
    }
    show() { only("job"); by("crumb").textContent = this.key; by("differences").hidden = true; this.head(this.key, null); by("tiles").replaceChildren(); }
    async look() {
      const [run] = this.runs, records = () => ask(`${this.path}/records`, { offset: this.offset });
      const [told, first] = await Promise.all([ask(this.path), records()]);
      if (view !== this) return;
      run.bound = told.bound;
      this.panels(told.panels);
      by("crumb").textContent = told.name;
      this.head(told.name, told); this.workers(told.workers);
      // What is there is drawn while the rest of a long history comes.
      for (let answer = first, more = true; more; answer = null) {
        answer ??= await records();
        if (view !== this) return;
        if (answer.reset) run.store.clear();
        run.store.add(answer.rows);
        this.offset = answer.offset;
        more = answer.more;
        this.draw(answer.reset);
        this.tiles(told);
      }
      await this.viewer.refresh();
    }
  }

  class Report extends Charted {
    constructor(data) {
      super(data.runs.map((run) => { const store = new Store(); store.add(run.rows); return { name: run.name, bound: run.overview.bound, store }; }));
      const episodes = data.runs.flatMap((run) => run.samples.map((file) => ({ ...file, key: `${run.name}/${file.key}`, run: data.runs.length > 1 ? run.name : "" })));
      const file = (key) => episodes.find((each) => each.key === key);
      const holds = (each, wanted) => JSON.stringify([each.task, each.group, each.verdict, ...(each.segments || []).map((part) => part.text || (part.tokens || []).join(""))]).toLowerCase().includes(wanted);
      const told = (each, index) => ({ ...each, index, head: headOf(each), tokens: (each.segments || []).reduce((sum, part) => sum + (part.tokens || []).length, 0) });
      this.viewer = new Samples.Viewer({
        list: async () => episodes, summaries: async (key) => file(key).episodes.map(told), episode: async (key, index) => file(key).episodes[index],
        search: async (text) => episodes.flatMap((each) => each.episodes.map((one, index) => ({ ...told(one, index), key: each.key, place: headOf(one) })).filter((one) => holds(one, text.toLowerCase()))),
      });
      this.data = data;
    }
    show() {
      const [first] = this.data.runs, several = this.data.runs.length > 1;
      only("job");
      by("crumb").textContent = this.data.made;
      this.head(this.data.title, several ? null : first.overview);
      this.panels(first.overview.panels);
      this.draw(true);
      if (several) this.differences(); else { this.tiles(first.overview); this.workers(first.overview.workers); }
      this.viewer.refresh();
    }
    differences() {
      by("differences").hidden = false;
      const line = (cells, kind) => { const row = node("tr"); cells.forEach((text, i) => { const cell = node(i && kind === "td" ? "td" : "th", text); if (cell.tagName === "TH") cell.scope = kind === "th" ? "col" : "row"; row.append(cell); }); return row; };
      const top = node("thead"), body = node("tbody");
      top.append(line(["Field", ...this.data.runs.map((run) => run.name)], "th"));
      for (const each of this.data.differences) body.append(line([each.field, ...each.values], "td"));
      for (const [label, name] of [["last reward", "reward_mean"], ["last held-out", "accuracy"], ["steps", ""]]) body.append(line([label, ...this.runs.map((run, i) => (name ? short(run.store.last(name)) : String(this.data.runs[i].overview.step)))], "td"));
      by("differences-table").replaceChildren(top, body);
    }
    async look() {}
  }
  const headOf = (each) => { const first = (each.segments || [])[0] || {}; return String(first.text || (first.tokens || []).join("")).slice(0, 160); };

  async function tick() {
    clearTimeout(timer);
    const now = view;
    if (!document.hidden) {
      try { await now.look(); trouble(""); }
      catch (error) {
        if (now !== view) return;
        if (error instanceof Refused) { only("login"); trouble(error.message); by("token").focus(); return; }
        trouble(error instanceof TypeError ? "The server does not answer; it is asked again." : error.message);
      }
    }
    if (now === view) timer = setTimeout(tick, EVERY_MS);
  }

  function route() {
    clearTimeout(timer);
    view?.close();
    const found = /^#\/job\/([^/]+)/.exec(location.hash);
    view = given ? new Report(given) : found ? new JobView(decodeURIComponent(found[1])) : new JobList();
    view.show();
    if (!given) tick();
  }
  setTheme(by("theme").value);
  if (!given) addEventListener("hashchange", route);
  addEventListener("beforeprint", () => { if (view?.charts) view.draw(true, true); });
  document.addEventListener("visibilitychange", () => { if (!document.hidden && view && !given) tick(); });
  route();
})();
