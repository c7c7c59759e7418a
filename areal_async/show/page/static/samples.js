"use strict";
// The viewer of samples. What a model wrote becomes text nodes and nothing else. Long answers are plain text until
// they are looked at: the blocks of units in sight alone have an element for each unit. A block is laid out alone, and
// ends where a line ends.
const Samples = (() => {
  const { node, short } = Charts;
  const BLOCK = 150, LONGEST = 600, KEPT = 8, COLOURS = 6;
  const PREVIEW = /^data:image\/jpeg;base64,[A-Za-z0-9+/=]+$/;
  const LOGP = [0.05, 0.3, 1, 2, 4];
  const by = (id) => document.getElementById(id);

  // What units are coloured by: the class of each, and the words of its legend.
  function scaleOf(what, segments) {
    const all = (name) => segments.flatMap((segment) => segment[name] || []);
    if (what === "version") {
      const known = [...new Set(all("version"))].sort((a, b) => a - b), step = Math.max(1, Math.ceil(known.length / COLOURS));
      const rank = new Map(known.map((version, i) => [version, Math.floor(i / step)]));
      const words = [];
      for (let i = 0; i < known.length; i += step) {
        const last = known[Math.min(known.length, i + step) - 1];
        words.push(known[i] === last ? `version ${last}` : `versions ${known[i]} to ${last}`);
      }
      return { of: (segment, i) => `u${rank.get(segment.version[i])}`, needs: "version", words: words.map((text, i) => [`u${i}`, text]) };
    }
    if (what === "logp") {
      const bucket = (value) => { const i = LOGP.findIndex((edge) => -value < edge); return i < 0 ? LOGP.length : i; };
      const words = [...LOGP.map((edge, i) => [`u${i}`, `log-prob above −${edge}`]), [`u${LOGP.length}`, "lower: unlikely"]];
      return { of: (segment, i) => `u${bucket(segment.logp[i])}`, needs: "logp", words };
    }
    if (what === "advantage") {
      let most = 0;
      for (const value of all("advantage")) most = Math.max(most, Math.abs(value));
      if (!most) return { of: () => "", needs: "advantage", words: [["", "the advantage is 0 everywhere here"]] };
      const of = (segment, i) => { const part = segment.advantage[i] / most; return part > .5 ? "u1" : part > 0 ? "u0" : part === 0 ? "" : part < -.5 ? "u4" : "u3"; };
      return { of, needs: "advantage", words: [["u1", `above ${short(most / 2)}`], ["u0", "above 0"], ["u3", "below 0"], ["u4", `below ${short(-most / 2)}`]] };
    }
    if (what === "mask") return { of: (segment, i) => (segment.mask[i] ? "u1" : "out"), needs: "mask", words: [["u1", "in the gradient"], ["out", "left out"]] };
    return { of: () => "", needs: "tokens", words: [] };
  }

  class Text {
    // The text of one segment in `scale`'s colours. `say` is told of the unit that is pointed at.
    constructor(segment, scale, label, say) {
      this.segment = segment; this.say = say; this.at = -1; this.scale = scale;
      this.root = node("div", "", "text");
      this.root.tabIndex = 0;
      this.root.setAttribute("role", "group");
      this.root.setAttribute("aria-label", label);
      const tokens = segment.tokens || [];
      this.units = tokens.length > 0;
      if (!this.units) { this.root.textContent = segment.text || ""; return; }
      this.blocks = [];
      this.seen = new IntersectionObserver((entries) => {
        for (const entry of entries) this.blocks[Number(entry.target.dataset.block)].near = entry.isIntersecting;
        this.work();
      }, { rootMargin: "200px", scrollMargin: "400px" });
      for (let from = 0, to = 0; from < tokens.length; from = to) {
        to = Math.min(tokens.length, from + BLOCK);
        while (to < tokens.length && to < from + LONGEST && !tokens[to - 1].endsWith("\n")) to += 1;
        const block = { from, to, span: node("div"), filled: false, near: false };
        block.span.textContent = tokens.slice(block.from, block.to).join("");
        block.span.dataset.block = String(this.blocks.length);
        this.blocks.push(block);
        this.root.append(block.span);
        this.seen.observe(block.span);
      }
      this.root.addEventListener("pointerover", (event) => { if (event.target.dataset.unit) this.tell(Number(event.target.dataset.unit)); });
      this.root.addEventListener("keydown", (event) => this.key(event));
      this.root.setAttribute("aria-description", "Left and right arrow go from unit to unit");
    }

    // One block in each frame, so that whoever scrolls fast is not kept waiting for colours of what has passed.
    work() {
      if (this.working) return;
      this.working = true;
      requestAnimationFrame(() => {
        this.working = false;
        const far = this.blocks.filter((each) => each.filled && !each.near);
        const block = this.blocks.find((each) => each.near && !each.filled) || (far.length > KEPT ? far[0] : null);
        if (!block) return;
        this.fill(block, block.near);
        this.work();
      });
    }

    recolour(scale) {
      this.scale = scale;
      for (const block of this.units ? this.blocks.filter((each) => each.filled) : []) {
        if (!block.near) { this.fill(block, false); continue; }
        [...block.span.children].forEach((unit, i) => { unit.className = this.colour(block.from + i); });
      }
    }

    // The classes of a unit.
    colour(i) {
      const coloured = (this.segment[this.scale.needs] || []).length === this.segment.tokens.length;
      return `${coloured ? this.scale.of(this.segment, i) : ""}${i === this.at ? " here" : ""}`;
    }

    fill(block, wanted) {
      if (block.filled === wanted) return;
      block.filled = wanted;
      const tokens = this.segment.tokens;
      if (!wanted) { block.span.textContent = tokens.slice(block.from, block.to).join(""); return; }
      const parts = [];
      for (let i = block.from; i < block.to; i += 1) {
        const unit = node("span", tokens[i], this.colour(i));
        unit.dataset.unit = String(i);
        parts.push(unit);
      }
      block.span.replaceChildren(...parts);
    }

    tell(i) {
      const value = (name) => (this.segment[name] || [])[i];
      const words = [`unit ${i + 1} of ${this.segment.tokens.length}`, JSON.stringify(this.segment.tokens[i])];
      for (const [name, label] of [["version", "version"], ["logp", "log-prob"], ["advantage", "advantage"], ["mask", "mask"]]) {
        if (value(name) !== undefined && value(name) !== null) words.push(`${label} ${short(value(name))}`);
      }
      this.say(words.join("   "));
    }

    key(event) {
      const moves = { ArrowLeft: -1, ArrowRight: 1 };
      const last = this.segment.tokens.length - 1;
      let next = event.key in moves ? this.at + moves[event.key] * (event.shiftKey ? 20 : 1) : event.key === "Home" ? 0 : event.key === "End" ? last : null;
      if (next === null) return;
      event.preventDefault();
      next = Math.min(last, Math.max(0, next));
      const block = this.blocks.find((each) => next < each.to);
      this.fill(block, true);
      this.root.querySelector(".here")?.classList.remove("here");
      this.at = next;
      const unit = block.span.children[next - block.from];
      unit.classList.add("here");
      const inside = unit.getBoundingClientRect(), frame = this.root.getBoundingClientRect();
      if (inside.bottom > frame.bottom || inside.top < frame.top) this.root.scrollTop += inside.top - frame.top - frame.height / 2;
      this.tell(next);
    }
  }

  class Viewer {
    // `source` has `list()`, `summaries(key)`, `episode(key, index)` and `search(text)`, all promises.
    constructor(source) {
      this.source = source; this.files = []; this.pinned = null; this.now = null; this.asked = 0;
      by("sample-file").onchange = () => { by("sample-find").value = ""; this.listed(); };
      by("sample-colour").onchange = () => this.recolour();
      by("sample-unpin").onclick = () => { this.pinned = null; this.draw(); };
      let timer = 0;
      by("sample-find").oninput = () => { clearTimeout(timer); timer = setTimeout(() => this.listed(), 250); };
    }

    async refresh() {
      const files = await this.source.list();
      const key = (list) => list.map((each) => each.key).join();
      if (key(files) === key(this.files)) return;
      const first = !this.files.length, chosen = by("sample-file").value;
      this.files = files;
      by("samples").hidden = !files.length;
      by("sample-file").replaceChildren(...files.map((file) => {
        const option = node("option", nameOf(file));
        option.value = file.key;
        return option;
      }));
      if (chosen && files.some((file) => file.key === chosen)) by("sample-file").value = chosen;
      if (first && files.length) await this.listed();
    }

    async listed() {
      const asked = (this.asked += 1), wanted = by("sample-find").value.trim(), key = by("sample-file").value;
      const found = wanted ? await this.source.search(wanted) : (await this.source.summaries(key)).map((each) => ({ ...each, key }));
      if (asked !== this.asked) return;
      const files = new Map(this.files.map((file) => [file.key, nameOf(file)]));
      by("sample-count").textContent = `${found.length} ${found.length === 1 ? "episode" : "episodes"}${wanted ? " found" : ""}`;
      by("sample-list").replaceChildren(...found.map((each) => {
        const item = node("li"), button = node("button", `${each.verdict && each.verdict !== "score" ? each.verdict : `reward ${short(each.reward)}`} · ${each.tokens} units`);
        button.type = "button";
        button.append(node("small", wanted ? `${files.get(each.key) || each.key} · ${each.place}` : each.head));
        button.addEventListener("click", () => this.show(each.key, each.index, button));
        item.append(button);
        return item;
      }));
      const button = by("sample-list").querySelector("button");
      if (button && !wanted) await this.show(found[0].key, found[0].index, button);
    }

    async show(key, index, button) {
      for (const each of by("sample-list").querySelectorAll("[aria-current]")) each.removeAttribute("aria-current");
      button.setAttribute("aria-current", "true");
      const episode = await this.source.episode(key, index);
      const file = this.files.find((each) => each.key === key);
      this.now = { episode, name: file ? nameOf(file) : key };
      this.draw();
    }

    draw() {
      by("sample-unpin").hidden = !this.pinned;
      const shown = [this.pinned, this.now].filter(Boolean);
      const segments = shown.flatMap((each) => each.episode.segments || []);
      this.scale(segments);
      this.texts = [];
      by("sample-unit").textContent = "";
      by("sample-shown").replaceChildren(...shown.map((each) => this.card(each)));
    }

    scale(segments) {
      this.segments = segments;
      this.colours = scaleOf(by("sample-colour").value, segments);
      const some = segments.some((segment) => (segment[this.colours.needs] || []).length);
      const words = this.colours.words.length && !some ? [["", `no unit here has a known ${by("sample-colour").selectedOptions[0].textContent}`]] : this.colours.words;
      by("sample-legend").replaceChildren(...words.map(([name, text]) => node("span", text, name)));
    }

    recolour() { if (this.segments) { this.scale(this.segments); for (const text of this.texts) text.recolour(this.colours); } }

    card(shown) {
      const { episode, name } = shown, card = node("article", "", "episode"), bar = node("div", "", "bar");
      bar.append(node("h3", `${name} · ${episode.episode ?? ""}`));
      card.setAttribute("aria-label", `Episode ${episode.episode ?? ""} of ${name}`);
      if (shown !== this.pinned) {
        const pin = node("button", "Keep, to compare"), same = node("button", "This task in all steps");
        pin.type = same.type = "button";
        pin.addEventListener("click", () => { this.pinned = shown; this.draw(); by("sample-unpin").focus(); });
        same.addEventListener("click", () => { by("sample-find").value = String(episode.task); this.listed(); by("sample-find").focus(); });
        bar.append(pin, same);
      }
      const tiles = node("dl", "", "tiles");
      for (const [label, value] of [["reward", short(episode.reward)], ["verdict", episode.verdict], ["ended by", episode.finish], ["version", episode.version], ["task", episode.task], ["source", episode.data_source], ["ground truth", plain(episode.ground_truth)]]) {
        if (value === undefined || value === null || value === "") continue;
        const tile = node("div");
        tile.append(node("dt", label), node("dd", String(value)));
        tiles.append(tile);
      }
      card.append(bar, tiles);
      const parts = Object.entries(episode.rewards || {});
      if (parts.length) {
        const table = node("table", "", "rewards"), caption = node("caption", "Components of the reward", "note");
        table.append(caption);
        for (const [part, value] of parts) {
          const row = node("tr"), head = node("th", part);
          head.scope = "row";
          row.append(head, node("td", short(value), "number"));
          table.append(row);
        }
        card.append(table);
      }
      let turn = 0;
      const several = new Set((episode.segments || []).map((segment) => segment.agent)).size > 1;
      for (const segment of episode.segments || []) {
        const author = String(segment.author), own = author === "assistant";
        if (own) turn += 1;
        const count = (segment.tokens || []).length;
        const label = [own ? `turn ${turn}: assistant` : author, several ? segment.agent : "", count ? `${count} units` : ""].filter(Boolean).join(" · ");
        const part = node("section", "", `segment ${["assistant", "tool", "environment"].includes(author) ? author : ""}`);
        const text = new Text(segment, this.colours, label, (words) => { by("sample-unit").textContent = words; });
        this.texts.push(text);
        part.append(node("h4", label), ...pictures([...(segment.images || [])], episode.images || {}), text.root);
        card.append(part);
      }
      return card;
    }
  }

  // Small previews of a segment's images, in order. No other URL is shown.
  function pictures(names, previews) {
    if (!names.length) return [];
    const root = node("div", "", "pictures"), urls = names.map((name) => previews[name]);
    urls.forEach((url, i) => {
      if (!PREVIEW.test(url)) return;
      const picture = node("img");
      picture.src = url;
      picture.alt = `image ${i + 1} of ${urls.length}`;
      root.append(picture);
    });
    const lacking = urls.length - root.children.length;
    if (lacking) root.append(node("span", `${lacking} ${lacking === 1 ? "image" : "images"} without a preview`, "note"));
    return [root];
  }

  const plain = (value) => (typeof value === "string" ? value : value === undefined || value === null ? "" : JSON.stringify(value));
  const nameOf = (file) => `${file.run ? `${file.run} · ` : ""}${file.kind === "evaluation" ? "evaluation of version" : "step"} ${file.step}${file.policy ? ` · ${file.policy}` : ""}`;

  return { Viewer, nameOf };
})();
