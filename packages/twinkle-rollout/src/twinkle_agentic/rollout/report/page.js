"use strict";
const data = JSON.parse(document.getElementById("index").textContent);
const rows = data.rows, runs = data.runs;
const ROW_PX = 52, CACHED_CHUNKS = 24;
const byId = (id) => document.getElementById(id);
const PHASES = ["queued", "reset", "model", "tools", "evaluate", "close"];
const COLORS = ["#9aa5b5", "#8f6fd6", "#3b78d8", "#2f9e6e", "#d29a2a", "#c46a9a"];

// Elements are made from text only: what a model or an environment wrote is never parsed as HTML.
function el(tag, attributes, ...children) {
  const svg = ["svg", "rect", "text", "line", "g", "title"].includes(tag);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) if (child !== null && child !== undefined) node.append(child);
  return node;
}
const number = (value, digits = 3) => value === null || value === undefined ? "none" : String(+Number(value).toFixed(digits));
const seconds = (value) => value >= 100 ? value.toFixed(0) + " s" : value.toFixed(2) + " s";
const turnCount = (row) => row.turns === 1 ? "1 turn" : `${row.turns} turns`;
const sum = (values) => values.reduce((total, value) => total + value, 0);
const mean = (values) => values.length ? sum(values) / values.length : null;
const scored = (some) => some.filter((row) => row.reward !== null);
function counted(keys) {
  const counts = new Map();
  for (const key of keys) counts.set(key, (counts.get(key) || 0) + 1);
  return [...counts].sort((a, b) => b[1] - a[1]);
}
function grouped(some, key) {
  const groups = new Map();
  for (const row of some) {
    const name = key(row);
    if (name === null) continue;
    if (!groups.has(name)) groups.set(name, []);
    groups.get(name).push(row);
  }
  return groups;
}

// Trajectories, unpacked on demand.
const cache = new Map();
async function chunkText(index) {
  const packed = atob(byId("chunk-" + index).textContent);
  const bytes = Uint8Array.from(packed, (char) => char.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).text();
}
async function chunk(index) {
  let found = cache.get(index);
  if (!found) {
    found = JSON.parse(await chunkText(index));
    if (cache.size >= CACHED_CHUNKS) cache.delete(cache.keys().next().value);
    cache.set(index, found);
  }
  return found;
}
const load = async (row) => (await chunk(row.chunk))[row.place];

// Overview
function tile(value, label) { return el("div", { class: "tile" }, el("b", {}, value), el("span", {}, label)); }
function panel(title, ...children) { return el("div", { class: "panel" }, el("h2", {}, title), children); }
function histogram(series, label) {
  const all = series.flat();
  if (!all.length) return el("p", { class: "hint" }, "nothing to show");
  const low = Math.min(...all), high = Math.max(...all), whole = all.every(Number.isInteger);
  const bins = whole ? Math.min(24, high - low + 1) : low === high ? 1 : 20;
  const width = (high - low + (whole ? 1 : 0)) / bins || 1;
  const counts = series.map((values) => {
    const found = new Array(bins).fill(0);
    for (const value of values) found[Math.min(bins - 1, Math.floor((value - low) / width))]++;
    return found;
  });
  const top = Math.max(...counts.flat()), W = 320, H = 120, step = W / bins;
  const bars = counts.flatMap((found, which) => found.map((count, bin) => {
    const wide = Math.max(1, step / series.length - 1.5), high = count / top * H;
    return el("rect", { x: bin * step + which * (wide + 0.5), y: 8 + H - high, width: wide, height: high,
      class: which ? "bar second" : "bar" },
      el("title", {}, `${runs.length > 1 ? runs[which].name + ": " : ""}${count} at ${number(low + bin * width)}${width > 1 || !whole ? " to " + number(low + (bin + 1) * width) : ""}`));
  }));
  return el("svg", { viewBox: `0 0 ${W} ${H + 26}`, width: "100%", role: "img", "aria-label": label }, bars,
    el("text", { x: 0, y: H + 22 }, number(low)), el("text", { x: W, y: H + 22, "text-anchor": "end" }, number(high)));
}
function table(heads, lines) {
  return el("table", {}, el("tr", {}, heads.map((head, at) => el("th", { class: at ? "n" : null }, head))),
    lines.map(({ cells, open }) => el("tr", open ? { class: "link", tabindex: 0, onclick: open,
      onkeydown: (event) => { if (event.key === "Enter") open(); } } : {},
      cells.map((cell, at) => el("td", { class: at ? "n" : null }, cell)))));
}
function overview() {
  const parts = [];
  runs.forEach((run, index) => {
    const mine = rows.filter((row) => row.run === index), good = scored(mine);
    const asked = run.record.asked ?? mine.length;
    const groups = [...grouped(mine, (row) => row.group).values()];
    const usage = mine.map((row) => row.usage).filter(Boolean);
    if (runs.length > 1) parts.push(el("h2", {}, `${"AB"[index]}: ${run.name}`));
    if (run.unfinished) parts.push(el("p", { class: "error" }, "This run has not ended, or was cut short: some trajectories are missing."));
    parts.push(el("div", { class: "tiles" },
      tile(number(mean(good.map((row) => row.reward))), "mean reward"),
      tile(`${good.length} of ${asked}`, "trajectories with a reward"),
      tile(String(sum(mine.map((row) => row.turns))), "turns"),
      groups.length ? tile(String(groups.filter((group) => new Set(scored(group).map((row) => row.reward)).size < 2).length) + " of " + groups.length, "groups without spread") : null,
      tile(String(sum(mine.map((row) => row.failed))), "failed steps"),
      usage.length ? tile(sum(usage.map((u) => u.completion_tokens || 0)).toLocaleString(), "sampled tokens") : null,
      tile(seconds(Math.max(0, ...mine.map((row) => row.timing.total || 0))), "slowest trajectory")));
  });
  const per = (pick) => runs.map((_, index) => rows.filter((row) => row.run === index).map(pick).filter((value) => value !== null));
  const panels = [
    panel("Reward", histogram(per((row) => row.reward), "histogram of rewards")),
    panel("Turns", histogram(per((row) => row.turns), "histogram of turns")),
    panel("Why they ended", table(["stop reason", "trajectories"], counted(rows.map((row) => row.stop)).map(([stop, count]) => ({
      cells: [stop, String(count)], open: () => filter({ stop }) })))),
    panel("Where the time went", timeBars()),
    panel("Turn by turn: mean seconds", turnTimes()),
    panel("Tools", toolTable()),
    groupPanel(), failurePanel(),
  ];
  byId("overview").replaceChildren(...parts, el("div", { class: "panels" }, panels));
}
function timeBars() {
  return runs.map((run, index) => {
    const totals = PHASES.map((phase) => sum(rows.filter((row) => row.run === index).map((row) => row.timing[phase] || 0)));
    const all = sum(totals) || 1;
    return el("div", {}, runs.length > 1 ? el("div", { class: "label" }, run.name) : null,
      el("div", { class: "stack" }, totals.map((total, at) => { const bar = el("i", { title: `${PHASES[at]}: ${seconds(total)}` });
        bar.style.width = total / all * 100 + "%"; bar.style.background = COLORS[at]; return bar; })),
      el("table", {}, totals.map((total, at) => { const key = el("span", { class: "key" }); key.style.background = COLORS[at];
        return el("tr", {}, el("td", {}, key, { queued: "waiting for a place", model: "waiting for the model", tools: "tools and steps" }[PHASES[at]] || PHASES[at]),
          el("td", { class: "n" }, seconds(total)), el("td", { class: "n" }, (total / all * 100).toFixed(0) + " %")); })));
  });
}
function turnTimes() {
  const turns = [];
  for (const row of rows) row.turn_times.forEach((time, at) => { (turns[at] ||= []).push(time); });
  if (!turns.length) return el("p", { class: "hint" }, "This run recorded no times per turn.");
  return table(["turn", "trajectories", "model", "tools"], turns.slice(0, 30).map((times, at) => ({
    cells: [String(at + 1), String(times.length), number(mean(times.map((time) => time.model || 0)), 2), number(mean(times.map((time) => time.tools || 0)), 2)] })));
}
function toolTable() {
  const names = grouped(rows.flatMap((row) => row.tools.map((tool) => ({ tool, row }))), (pair) => pair.tool);
  if (!names.size) return el("p", { class: "hint" }, "The model called no tool.");
  const lines = [...names].map(([tool, pairs]) => ({ tool, some: pairs.map((pair) => pair.row) }))
    .map(({ tool, some }) => ({ tool, some, slow: mean(some.map((row) => (row.timing.tools || 0) / Math.max(1, row.turns))) }))
    .sort((a, b) => b.slow - a.slow);
  return table(["tool", "trajectories", "mean reward", "s per turn"], lines.map(({ tool, some, slow }) => ({
    cells: [tool, String(some.length), number(mean(scored(some).map((row) => row.reward))), number(slow)], open: () => filter({ tool }) })));
}
function groupPanel() {
  const flat = [...grouped(rows, (row) => row.group === null ? null : (runs.length > 1 ? "AB"[row.run] + ": " : "") + row.group)]
    .filter(([, some]) => new Set(scored(some).map((row) => row.reward)).size < 2);
  if (!flat.length) return null;
  return panel("Groups without spread (they teach a group-relative method nothing)", table(["group", "samples", "scored", "reward"],
    flat.slice(0, 200).map(([name, some]) => ({ cells: [name, String(some.length), String(scored(some).length), number(mean(scored(some).map((row) => row.reward)))],
      open: () => filter({ group: some[0].group }) }))));
}
function failurePanel() {
  const failures = counted(rows.filter((row) => row.error !== null).map((row) => `${row.kind || row.stop}: ${row.error}`));
  if (!failures.length) return null;
  const found = panel("Failures", table(["cause", "count"], failures.slice(0, 60).map(([cause, count]) => ({
    cells: [cause, String(count)], open: () => filter({ text: cause.slice(cause.indexOf(": ") + 2, 80) }) }))));
  found.classList.add("wide");
  return found;
}

// The list: only the rows in sight are in the page.
let shown = rows, chosen = null, searched = null, searchRun = 0;
function matches(row) {
  const reward = byId("reward").value, stop = byId("stop").value, tool = byId("tool").value, group = byId("group").value, run = byId("run").value;
  return (!stop || row.stop === stop) && (!tool || row.tools.includes(tool)) && (!group || row.group === group) && (!run || row.run === Number(run))
    && (!reward || (reward === "none" ? row.reward === null : row.reward !== null && (reward === "zero" ? row.reward <= 0 : reward === "positive" ? row.reward > 0 : row.reward >= 1)))
    && (searched === null || searched.has(row));
}
function refresh() {
  const order = byId("sort").value, sign = order.startsWith("-") ? -1 : 1;
  const key = { reward: (row) => row.reward ?? -Infinity, turns: (row) => row.turns, seconds: (row) => row.timing.total || 0 }[order.replace("-", "")];
  shown = rows.filter(matches);
  if (key) shown.sort((a, b) => (key(a) < key(b) ? -1 : key(a) > key(b) ? 1 : 0) * sign);
  byId("count").textContent = `${shown.length.toLocaleString()} of ${rows.length.toLocaleString()}`;
  byId("rows").style.height = shown.length * ROW_PX + "px";
  byId("list").scrollTop = 0;
  draw();
}
function draw() {
  const list = byId("list"), first = Math.max(0, Math.floor(list.scrollTop / ROW_PX) - 5);
  const last = Math.min(shown.length, first + Math.ceil((list.clientHeight || 600) / ROW_PX) + 10);
  byId("rows").replaceChildren(...shown.slice(first, last).map((row, at) => {
    const node = el("div", { class: "row", role: "option", "aria-selected": String(row === chosen), onclick: () => choose(row) },
      el("div", { class: "top" }, el("b", {}, (runs.length > 1 ? "AB"[row.run] + " " : "") + row.id), rewardMark(row),
        el("span", { class: "pill" }, row.stop), el("span", { class: "pill" }, turnCount(row))),
      el("div", { class: "sub" }, row.error || row.title));
    node.style.top = (first + at) * ROW_PX + "px";
    return node;
  }));
}
function rewardMark(row) {
  return el("span", { class: "reward" + (row.reward === null ? " none" : row.reward <= 0 ? " zero" : "") }, row.reward === null ? "no reward" : number(row.reward));
}
async function search() {
  const text = byId("text").value.trim().toLowerCase(), mine = ++searchRun;
  if (!text) { searched = null; refresh(); return; }
  const found = new Set(), byChunk = grouped(rows, (row) => row.chunk);
  // The text as JSON writes it: quotes and line ends of the query are escaped in the same way.
  const needle = JSON.stringify(text).slice(1, -1);
  for (const [index, some] of byChunk) {
    const whole = await chunk(index);
    if (mine !== searchRun) return;
    for (const row of some) {
      const lower = JSON.stringify(whole[row.place]).toLowerCase();
      if (lower.includes(needle) || lower.includes(JSON.stringify(needle).slice(1, -1))) found.add(row);
    }
    byId("count").textContent = `searching: ${found.size} found`;
  }
  searched = found;
  refresh();
}
function filter(wanted) {
  for (const name of ["stop", "tool", "group", "reward", "run"]) byId(name).value = wanted[name] ?? "";
  byId("text").value = wanted.text ?? "";
  show("trajectories");
  search();
}

// One trajectory
async function choose(row) {
  chosen = row;
  draw();
  const target = byId("detail"), whole = await load(row);
  if (chosen !== row) return;
  target.replaceChildren(...trajectory(whole, row));
  target.scrollTop = 0;
  location.hash = encodeURIComponent((runs.length > 1 ? row.run + "/" : "") + row.id);
}
function trajectory(whole, row) {
  const timing = Object.entries(whole.timing || {}).map(([name, value]) => `${name} ${seconds(value)}`).join(", ");
  const nodes = [el("h2", {}, `${row.id} · `, rewardMark(row), ` · ${whole.stop_reason} · ${turnCount(whole)}`)];
  if ((whole.step_rewards || []).length) nodes.push(el("p", { class: "label" }, "step rewards: " + whole.step_rewards.map((value) => number(value)).join(", ")));
  if (timing) nodes.push(el("p", { class: "label" }, timing));
  for (const error of [...(whole.earlier_errors || []), whole.error, whole.close_error]) if (error) nodes.push(el("p", { class: "error" }, error));
  let turn = 0;
  const tokens = new Map((whole.token_turns || []).map((one) => [one.turn, one]));
  for (const message of whole.messages || []) {
    const mine = message.role === "assistant" ? ++turn : null;
    nodes.push(messageNode(message, mine, tokens.get(mine), mine && (whole.turn_timings || [])[mine - 1]));
  }
  const rest = Object.fromEntries(Object.entries(whole).filter(([name]) => !["messages", "token_turns"].includes(name)));
  nodes.push(el("details", {}, el("summary", {}, "all fields"), el("div", { class: "body" }, el("pre", { class: "code" }, JSON.stringify(rest, null, 1)))));
  return nodes;
}
function messageNode(message, turn, tokens, times) {
  const body = el("div", { class: "body" }), reasoning = message.reasoning_content ?? message.reasoning;
  if (reasoning) body.append(el("div", { class: "label" }, "reasoning"), text(reasoning));
  for (const part of parts(message.content)) body.append(part);
  for (const call of message.tool_calls || []) body.append(...callNodes(call));
  if (tokens) body.append(...tokenNodes(tokens));
  const first = plain(message).split("\n")[0].slice(0, 200);
  const said = turn === null ? message.role : `turn ${turn}`;
  return el("details", { class: message.role, open: message.role !== "system" && plain(message).length < 4000 }, el("summary", {}, el("b", {}, said),
    el("span", { class: "first" }, first), times ? el("span", { class: "pill" }, `model ${seconds(times.model || 0)}, tools ${seconds(times.tools || 0)}`) : null), body);
}
function plain(message) {
  const content = Array.isArray(message.content) ? message.content.map((part) => part.text || "[image]").join(" ") : message.content || "";
  return content + (message.tool_calls || []).map((call) => ` ${call.function?.name}(${call.function?.arguments})`).join("");
}
function parts(content) {
  if (!Array.isArray(content)) return content ? [text(String(content))] : [];
  return content.map((part) => {
    const url = part.image_url?.url;
    if (!url) return text(part.text ?? JSON.stringify(part));
    return url.startsWith("data:image/") ? el("img", { src: url, alt: "image of the observation", loading: "lazy" }) : el("p", { class: "hint" }, `image: ${url}`);
  });
}
function callNodes(call) {
  const nodes = [el("div", { class: "label" }, "calls ", el("b", {}, call.function?.name ?? "?"))];
  let given;
  try { given = JSON.parse(call.function.arguments); } catch { return [...nodes, code(String(call.function?.arguments))]; }
  for (const [name, value] of Object.entries(given ?? {})) nodes.push(el("div", { class: "label" }, name), code(typeof value === "string" ? value : JSON.stringify(value, null, 1)));
  return nodes;
}
function tokenNodes(turn) {
  const ids = turn.token_ids || [], logprobs = turn.logprobs || [];
  const label = `${ids.length} sampled tokens` + (turn.problem ? `: not to be trained on: ${turn.problem}` : "");
  return [el("div", { class: turn.problem ? "error" : "label" }, label), el("div", { class: "tokens" }, ids.slice(0, 2000).map((id, at) => {
    const value = logprobs[at], node = el("i", { title: `token ${id}, log probability ${number(value, 4)}` }, String(id));
    if (typeof value === "number") node.style.background = `hsl(${Math.round(120 * Math.exp(value))} 60% 50% / .45)`;
    return node;
  }))];
}
function marked(node, value) {
  const wanted = byId("text").value.trim().toLowerCase();
  if (!wanted) { node.textContent = value; return node; }
  const lower = value.toLowerCase();
  let at = 0;
  for (let found = lower.indexOf(wanted); found >= 0 && at < 200000; found = lower.indexOf(wanted, at)) {
    node.append(value.slice(at, found), el("mark", {}, value.slice(found, found + wanted.length)));
    at = found + wanted.length;
  }
  node.append(value.slice(at));
  return node;
}
const text = (value) => marked(el("pre", {}), value);
const code = (value) => marked(el("pre", { class: "code" }), value);

// Two runs side by side
function compare() {
  const byTask = grouped(rows, (row) => row.group ?? row.id);
  const lines = [...byTask].map(([task, some]) => {
    const sides = [0, 1].map((run) => some.filter((row) => row.run === run)), rewards = sides.map((side) => mean(scored(side).map((row) => row.reward)));
    return { task, sides, rewards, change: rewards[0] === null || rewards[1] === null ? null : rewards[1] - rewards[0] };
  });
  lines.sort((a, b) => (a.change ?? Infinity) - (b.change ?? Infinity));
  const view = el("div", { class: "two", id: "both" });
  const open = async (line) => {
    const sides = await Promise.all(line.sides.map(async (side, run) => el("div", {}, el("h2", {}, `${"AB"[run]}: ${runs[run].name}`),
      side.length ? trajectory(await load(side[0]), side[0]) : el("p", { class: "hint" }, "This run does not have the task."))));
    view.replaceChildren(...sides);
    view.scrollIntoView({ block: "start" });
  };
  const counts = [["better in B", (line) => line.change > 0], ["worse in B", (line) => line.change !== null && line.change < 0],
    ["equal", (line) => line.change === 0], ["not in both, or without a reward", (line) => line.change === null]];
  byId("compare").replaceChildren(el("div", { class: "tiles" }, counts.map(([label, test]) => tile(String(lines.filter(test).length), label))),
    panel("Tasks, the largest loss first", table(["task", "A: " + runs[0].name, "B: " + runs[1].name, "change"], lines.slice(0, 500).map((line) => ({
      cells: [line.task, number(line.rewards[0]), number(line.rewards[1]), line.change === null ? "" : number(line.change)], open: () => open(line) })))), view);
}

function show(name) {
  for (const tab of ["overview", "trajectories", "compare"]) {
    byId(tab).hidden = tab !== name;
    byId("tab-" + tab).setAttribute("aria-selected", String(tab === name));
  }
  if (name === "trajectories") draw();
}
function options(id, label, values) {
  byId(id).replaceChildren(el("option", { value: "" }, label), ...values.map(([value, said]) => el("option", { value }, said)));
}
function start() {
  options("stop", "any stop reason", counted(rows.map((row) => row.stop)).map(([stop, count]) => [stop, `${stop} (${count})`]));
  options("tool", "any tool", counted(rows.flatMap((row) => row.tools)).map(([tool, count]) => [tool, `${tool} (${count})`]));
  const groups = [...grouped(rows, (row) => row.group).keys()];
  options("group", "any group", groups.map((group) => [group, group]));
  byId("group").hidden = !groups.length;
  options("run", "both runs", runs.map((run, index) => [index, `${"AB"[index]}: ${run.name}`]));
  byId("run").hidden = byId("tab-compare").hidden = runs.length < 2;
  for (const tab of ["overview", "trajectories", "compare"]) byId("tab-" + tab).addEventListener("click", () => show(tab));
  for (const id of ["stop", "tool", "reward", "group", "sort", "run"]) byId(id).addEventListener("change", refresh);
  byId("filters").addEventListener("submit", (event) => { event.preventDefault(); search(); });
  byId("text").addEventListener("search", search);
  byId("list").addEventListener("scroll", () => requestAnimationFrame(draw), { passive: true });
  addEventListener("resize", draw);
  addEventListener("keydown", (event) => {
    if (["INPUT", "SELECT"].includes(event.target.tagName) || byId("trajectories").hidden || event.ctrlKey || event.metaKey) return;
    if (event.key === "/") { event.preventDefault(); byId("text").focus(); }
    if (event.key === "e") { const all = [...byId("detail").querySelectorAll("details")], open = all.some((one) => !one.open); for (const one of all) one.open = open; }
    if (["j", "k", "ArrowDown", "ArrowUp"].includes(event.key) && shown.length) {
      event.preventDefault();
      const at = Math.min(shown.length - 1, Math.max(0, shown.indexOf(chosen) + (["j", "ArrowDown"].includes(event.key) ? 1 : -1)));
      const list = byId("list"), top = at * ROW_PX;
      if (top < list.scrollTop) list.scrollTop = top;
      if (top + ROW_PX > list.scrollTop + list.clientHeight) list.scrollTop = top + ROW_PX - list.clientHeight;
      choose(shown[at]);
    }
  });
  overview();
  if (runs.length > 1) compare();
  refresh();
  const wanted = decodeURIComponent(location.hash.slice(1));
  const found = wanted && rows.find((row) => (runs.length > 1 ? row.run + "/" : "") + row.id === wanted);
  if (found) { show("trajectories"); choose(found); }
  document.body.dataset.ready = "true";
}
start();
