"use strict";
// Everything shown comes from the data block as text nodes: names in a dump are never markup.
const data = JSON.parse(document.getElementById("data").textContent);
const report = data.report;
const STATE = {c: "completed", s: "started", w: "issued, waiting", n: "not issued",
  o: "overwritten in the ring", x: "no dump of this rank"};
const guilty = new Set(report.culprits.map(c => c.rank));
const view = {group: 0, fold: true, query: "", rank: null};
const main = document.getElementById("main");
const tip = document.getElementById("tip");

function h(tag, props, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(props || {})) {
    if (key === "style") for (const [k, v] of Object.entries(value)) {
      if (k.startsWith("--")) node.style.setProperty(k, v); else node.style[k] = v;
    }
    else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key in node) node[key] = value;
    else node.setAttribute(key, value);
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false && child !== "") node.append(child);
  }
  return node;
}

function spans(ranks) {
  const parts = [];
  for (const rank of [...ranks].sort((a, b) => a - b)) {
    const last = parts[parts.length - 1];
    if (last && rank === last[1] + 1) last[1] = rank; else parts.push([rank, rank]);
  }
  const text = parts.map(([a, b]) => a === b ? `${a}` : b === a + 1 ? `${a}, ${b}` : `${a}-${b}`);
  return text.length > 8 ? [...text.slice(0, 6), "…", text[text.length - 1]].join(", ")
    : text.join(", ");
}
const sentence = text => text[0].toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");
const named = ranks => (ranks.length === 1 ? "rank " : "ranks ") + spans(ranks);
const foldLabel = ranks => ranks.length > 1 ? `${ranks.length}: ${spans(ranks)}` : `${ranks[0]}`;
const callOf = c => `${c.op || "a call"}${c.seq === null ? "" : " #" + c.seq} in ${c.group}`;
const shortPath = text => text.replace(/^\/?(?:[^/:]+\/)+((?:[^/:]+\/){2}[^/:]+:)/, "…/$1");

// ---- decoding: a row is [rank, letters, odd calls, sites, times, durations] --------------------
const decoded = new Map();
function decode(group, row) {
  if (decoded.has(row)) return decoded.get(row);
  const [rank, letters, calls, sites, times, durations] = row;
  let at = 0;
  const created = times.map(step => step === null ? null : (at += step));
  const cell = place => ({
    letter: letters[place].toLowerCase(), odd: letters[place] !== letters[place].toLowerCase(),
    call: place in calls ? calls[place] : group.calls[place],
    site: place in sites ? sites[place] : group.sites[place],
    created: created[place], duration: durations ? durations[place] : null,
  });
  const value = {rank, letters, cell, created};
  decoded.set(row, value);
  return value;
}
const issued = letter => "csw".includes(letter);
const callText = index => index >= 0 ? data.calls[index] : "";
const siteText = index => index >= 0 ? data.sites[index] : [];
function clock(ticks) { // tenths of a millisecond
  const seconds = ticks / 10000;
  return seconds < 120 ? `+${seconds.toFixed(3)} s` : `+${(seconds / 60).toFixed(2)} min`;
}

// ---- search ------------------------------------------------------------------------------------
function searcher(query) {
  const text = query.trim().toLowerCase();
  if (!text) return null;
  const range = /^(?:ranks?\s*)?(\d+)(?:\s*-\s*(\d+))?$/.exec(text);
  if (range) {
    const [low, high] = [+range[1], +(range[2] || range[1])];
    return {row: (g, r) => r[0] >= low && r[0] <= high, rank: rank => rank >= low && rank <= high};
  }
  const has = value => value.toLowerCase().includes(text);
  const calls = new Set(data.calls.keys().filter(i => has(data.calls[i])));
  const sites = new Set(data.sites.keys().filter(i => data.sites[i].some(has)));
  const stacks = rank => (data.stacks[rank] || []).some(([name, frames]) => has(name) || frames.some(has))
    || (data.beside[rank] || []).some(has);
  const usual = new Map(data.groups.map(g => [g, [...g.calls.keys()].filter(
    i => calls.has(g.calls[i]) || sites.has(g.sites[i]))]));
  const row = (g, r) => has(g.label) || stacks(r[0])
    || usual.get(g).some(i => issued(r[1][i].toLowerCase()) && !(i in r[2]) && !(i in r[3]))
    || Object.values(r[2]).some(i => calls.has(i)) || Object.values(r[3]).some(i => sites.has(i));
  return {row, rank: stacks};
}

// ---- rows --------------------------------------------------------------------------------------
function visibleRows(group) {
  const search = searcher(view.query);
  const rows = search ? group.rows.filter(r => search.row(group, r)) : group.rows;
  if (!view.fold) return rows.map(r => [r]);
  const folds = new Map();
  for (const r of rows) {
    const key = (guilty.has(r[0]) ? r[0] : "") + "|" + r[1] + "|" + JSON.stringify(r[2]);
    if (folds.has(key)) folds.get(key).push(r); else folds.set(key, [r]);
  }
  return [...folds.values()];
}
function runs(letters) {
  const list = [];
  for (const letter of letters) {
    const last = list[list.length - 1];
    if (last && last[0] === letter) last[1]++; else list.push([letter, 1]);
  }
  return list;
}
function showTip(event, lines) {
  tip.replaceChildren(...lines.filter(Boolean).map(line => h("div", {}, line)));
  tip.style.display = "block";
  const x = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
  const y = event.clientY + 18 + tip.offsetHeight > innerHeight
    ? event.clientY - tip.offsetHeight - 12 : event.clientY + 18;
  tip.style.left = Math.max(4, x) + "px";
  tip.style.top = Math.max(4, y) + "px";
}
const hideTip = () => { tip.style.display = "none"; };

function describe(group, row, place) {
  const one = decode(group, row);
  const cell = one.cell(place);
  const number = group.p2p ? `send or recv ${-group.seqs[place] + 1} from the end`
    : `#${group.seqs[place]}`;
  const source = siteText(cell.site)[0];
  return [`rank ${one.rank}, ${number}: ${STATE[cell.letter]}`,
    issued(cell.letter) ? callText(cell.call) : callText(group.calls[place]) &&
      `others: ${callText(group.calls[place])}`,
    cell.odd ? "unlike the other ranks" : "",
    source && shortPath(source),
    cell.created !== null && cell.created !== undefined ? `issued at ${clock(cell.created)}` : "",
    cell.duration !== null && cell.duration >= 0 ? `took ${cell.duration} ms` : ""];
}

function matrix(group) {
  const folds = visibleRows(group);
  const dense = folds.length > 160;
  const grid = h("div", {className: dense ? "grid dense" : "grid"});
  const axis = group.p2p ? ["older", "newest"]
    : group.seqs.length ? [`#${group.seqs[0]}`, `#${group.seqs[group.seqs.length - 1]}`] : [];
  grid.append(h("span"), h("div", {className: "axis"}, axis.map(text => h("span", {}, text))));
  for (const fold of folds) {
    const ranks = fold.map(r => r[0]);
    const isGuilty = ranks.some(rank => guilty.has(rank));
    const label = foldLabel(ranks);
    const open = () => { view.rank = ranks[0]; drawRank(true); };
    grid.append(
      h("button", {className: `label link${isGuilty ? " guilty" : ""}`, title: named(ranks),
        onclick: open}, label),
      h("div", {className: "row", style: {"--step": `${100 / Math.max(1, group.seqs.length)}%`}, onclick: open, onmouseleave: hideTip,
        onmousemove: event => {
          const box = event.currentTarget.getBoundingClientRect();
          const place = Math.floor((event.clientX - box.left) / box.width * fold[0][1].length);
          if (place >= 0 && place < fold[0][1].length) {
            showTip(event, [ranks.length > 1 ? named(ranks) + " alike" : "",
              ...describe(group, fold[0], place)]);
          }
        }},
      runs(fold[0][1]).map(([letter, count]) => h("i", {
        className: letter === letter.toUpperCase() ? "odd" : letter, style: {flex: `${count} 0 0`}}))));
  }
  const focus = report.culprits.find(c => c.seq !== null && c.group === group.name);
  const place = focus && !group.p2p ? group.seqs.indexOf(focus.seq) : -1;
  if (place >= 0 && folds.length) {
    const line = h("div", {className: "focus"});
    grid.append(line);
    requestAnimationFrame(() => {
      const row = grid.querySelector(".row");
      const width = row.offsetWidth / group.seqs.length;
      line.style.left = row.offsetLeft + place * width - 1 + "px";
      line.style.width = Math.max(4, width + 2) + "px";
      line.style.top = row.offsetTop - 3 + "px";
    });
  }
  return [grid, folds];
}

// ---- timeline ----------------------------------------------------------------------------------
function timeline(group, folds) {
  const times = folds.flat().flatMap(row => decode(group, row).created.filter(t => t !== null));
  if (!times.length) return h("p", {className: "dim"}, "These records hold no times.");
  let low = Infinity, high = -Infinity;
  for (const t of times) { low = Math.min(low, t); high = Math.max(high, t); }
  const tail = Math.max(1, (high - low) * 0.06);
  const end = high + tail;
  const canvas = h("canvas", {onmouseleave: hideTip});
  const rowHeight = folds.length > 160 ? 9 : 22;
  const holder = h("div", {className: folds.length > 160 ? "grid dense" : "grid"});
  const labels = h("div", {style: {alignSelf: "stretch"}}, folds.map(fold => h("div", {
    className: `label${fold.some(r => guilty.has(r[0])) ? " guilty" : ""}`,
    style: {height: rowHeight + "px", lineHeight: rowHeight + "px"}},
  foldLabel(fold.map(r => r[0])))));
  holder.append(h("span"), h("div", {className: "axis"},
    h("span", {}, clock(low)), h("span", {}, "when each call was issued"), h("span", {}, clock(high))),
  labels, canvas);
  const at = (t, width) => (t - low) / (end - low) * (width - 2);
  canvas.style.height = folds.length * rowHeight + "px";
  requestAnimationFrame(() => {
    const style = getComputedStyle(document.documentElement);
    const color = name => style.getPropertyValue("--" + name).trim();
    const width = canvas.clientWidth, scale = devicePixelRatio || 1;
    canvas.width = width * scale; canvas.height = folds.length * rowHeight * scale;
    const ink = canvas.getContext("2d");
    ink.scale(scale, scale);
    folds.forEach((fold, line) => drawLane(ink, group, fold, line * rowHeight, rowHeight, width,
      t => at(t, width), end, color));
  });
  canvas.addEventListener("mousemove", event => {
    const box = canvas.getBoundingClientRect();
    const fold = folds[Math.floor((event.clientY - box.top) / rowHeight)];
    if (!fold) return;
    const one = decode(group, fold[0]);
    const x = event.clientX - box.left;
    let best = -1, gap = Infinity;
    one.created.forEach((t, place) => {
      if (t === null) return;
      const distance = Math.abs(at(t, box.width) - x);
      if (distance < gap) { gap = distance; best = place; }
    });
    if (best >= 0) showTip(event, describe(group, fold[0], best)); else hideTip();
  });
  return holder;
}
function drawLane(ink, group, fold, top, height, width, x, end, color) {
  const pad = height > 12 ? 3 : 1;
  ink.fillStyle = color("n");
  ink.fillRect(0, top + pad, width, height - 2 * pad);
  const rows = fold.map(row => decode(group, row));
  for (let place = 0; place < group.seqs.length; place++) {
    let first = Infinity, last = -Infinity;
    for (const one of rows) {
      const t = one.created[place];
      if (t !== null && t !== undefined) { first = Math.min(first, t); last = Math.max(last, t); }
    }
    if (first === Infinity) continue;
    const cell = rows[0].cell(place);
    const left = x(first);
    if (cell.letter !== "c") {
      ink.fillStyle = color(cell.letter);
      ink.globalAlpha = 0.35;
      ink.fillRect(left, top + pad, x(end) - left, height - 2 * pad);
      ink.globalAlpha = 1;
    }
    const long = cell.duration > 0 ? x(first + 10 * cell.duration) - left : 0;
    ink.fillStyle = color(cell.odd ? "odd" : cell.letter);
    ink.fillRect(left, top + pad, Math.max(2, long, x(last) - left), height - 2 * pad);
  }
}

// ---- the parts of the page ---------------------------------------------------------------------
function header() {
  const badge = h("span", {className: `badge ${report.verdict}`}, report.verdict.toUpperCase());
  const size = report.entries_read
    ? `${report.ranks_read} of ${report.world_size} ranks, ${report.entries_read.toLocaleString("en")} entries`
    : `${report.ranks_read} ranks spoke in the logs`;
  return h("header", {}, badge, h("h1", {}, report.summary), h("p", {className: "meta"}, size));
}
function culprits() {
  const alike = new Map();
  for (const c of report.culprits) {
    const key = [c.kind, c.group, c.seq, c.op, c.where, c.because.join("|").replace(/\d+/g, "")].join("\u0001");
    if (alike.has(key)) alike.get(key).push(c); else alike.set(key, [c]);
  }
  return [...alike.values()].map(list => {
    const c = list[0], ranks = list.map(one => one.rank);
    return h("section", {className: "card culprit"},
      h("h2", {}, h("button", {className: "link", onclick: () => { view.rank = c.rank; drawRank(true); }},
        named(ranks)[0].toUpperCase() + named(ranks).slice(1)), " " + data.kinds[c.kind],
      h("span", {className: "pill"}, `confidence ${c.confidence.toFixed(2)}`)),
      h("dl", {}, c.op || c.seq !== null ? [h("dt", {}, "call"), h("dd", {}, h("code", {}, callOf(c)),
        c.group_ranks.length ? ` (${c.group_ranks.length} ranks)` : "")] : [],
      c.where ? [h("dt", {}, "where"), h("dd", {}, h("code", {}, c.where))] : [],
      h("dt", {}, "why"), h("dd", {}, h("ul", {}, c.because.map(text => h("li", {}, sentence(text)))))),
      c.stack.length ? h("details", {}, h("summary", {}, "stack"),
        h("pre", {}, c.stack.map(f => `${f.filename}:${f.line} in ${f.name}`).join("\n"))) : "");
  });
}
function listing(title, items, ordered) {
  if (!items.length) return "";
  return h("section", {className: "card"}, h("h2", {}, title),
    h(ordered ? "ol" : "ul", {}, items.map(text => h("li", {}, text))));
}
function consequences() {
  if (!report.consequences.length) return "";
  const alike = new Map();
  for (const c of report.consequences) {
    const key = callOf(c) + "\u0001" + c.waits_for.join(",");
    if (!alike.has(key)) alike.set(key, {call: callOf(c), whom: c.waits_for, where: c.where, who: []});
    alike.get(key).who.push(c.rank);
  }
  const rows = [...alike.values()].sort((a, b) => b.who.length - a.who.length);
  return h("section", {className: "card"}, h("h2", {}, "Who only waits"),
    h("div", {className: "scroll tall"}, h("table", {}, h("thead", {}, h("tr", {},
      ["ranks", "in", "for", "at"].map(text => h("th", {}, text)))),
    h("tbody", {}, rows.slice(0, 400).map(r => h("tr", {}, h("td", {}, spans(r.who)),
      h("td", {}, h("code", {}, r.call)), h("td", {}, r.whom.length ? spans(r.whom) : ""),
      h("td", {}, h("code", {}, shortPath(r.where)))))))));
}
function legend() {
  const entry = (name, text) => h("span", {}, h("i", {className: name}), text);
  return h("div", {className: "legend"}, Object.entries(STATE).map(([k, v]) => entry(k, v)),
    entry("odd", "unlike the others"));
}

const board = h("div"), lane = h("div"), count = h("span", {className: "meta"});
const rankBox = h("div");
function drawGroup() {
  if (!data.groups.length) return;
  const group = data.groups[view.group];
  const [grid, folds] = matrix(group);
  board.replaceChildren(grid);
  for (const box of [board, lane]) box.className = folds.length > 30 ? "high" : "";
  lane.replaceChildren(timeline(group, folds));
  const shown = folds.flat().length;
  count.textContent = `${shown} of ${group.rows.length} ranks` +
    (view.fold && folds.length < shown ? `, in ${folds.length} lines` : "");
}
function groupSelect() {
  const search = searcher(view.query);
  return data.groups.map((g, i) => {
    const hits = search ? g.rows.filter(r => search.row(g, r)).length : 0;
    return h("option", {value: i, selected: i === view.group},
      `${g.label}  (${g.rows.length} ranks: ${spans(g.rows.map(r => r[0]))})` +
      `${g.hanging ? "  open calls" : ""}${search ? `  [${hits} match]` : ""}`);
  });
}
function controls() {
  const select = h("select", {title: "group", onchange: event => { view.group = +event.target.value; drawGroup(); }},
    groupSelect());
  const search = h("input", {type: "search", id: "search", autocomplete: "off",
    placeholder: "Search: rank 7, 8-15, all_reduce, train.py …  ( / )",
    oninput: event => {
      view.query = event.target.value;
      const finds = searcher(view.query);
      if (finds && !data.groups[view.group].rows.some(r => finds.row(data.groups[view.group], r))) {
        const next = data.groups.findIndex(g => g.rows.some(r => finds.row(g, r)));
        if (next >= 0) view.group = next;
      }
      select.replaceChildren(...groupSelect());
      drawGroup();
    }});
  const fold = h("input", {type: "checkbox", checked: view.fold,
    onchange: event => { view.fold = event.target.checked; drawGroup(); }});
  return h("div", {className: "bar"}, search, select,
    h("label", {}, fold, " fold alike ranks"), count);
}
function drawRank(scroll) {
  if (view.rank === null) return;
  const rank = view.rank, calls = [];
  for (const group of data.groups) {
    const row = group.rows.find(r => r[0] === rank);
    if (!row) continue;
    const one = decode(group, row);
    group.seqs.forEach((seq, place) => {
      const cell = one.cell(place);
      if (issued(cell.letter)) calls.push({group, seq: group.p2p ? "" : seq, ...cell});
    });
  }
  calls.sort((a, b) => (b.created ?? 0) - (a.created ?? 0) || (+b.seq) - (+a.seq));
  const stacks = data.stacks[rank] || [], beside = data.beside[rank] || [];
  rankBox.replaceChildren(h("section", {className: "card", id: "rank"},
    h("h2", {}, `Rank ${rank}`, guilty.has(rank) ? h("span", {className: "pill"}, "culprit") : ""),
    beside.length ? h("ul", {}, beside.map(text => h("li", {}, text))) : "",
    stacks.map(([thread, frames]) => h("details", {open: true}, h("summary", {}, `stack of ${thread}`),
      h("pre", {}, frames.join("\n")))),
    calls.length ? h("div", {className: "scroll tall"}, h("table", {}, h("thead", {}, h("tr", {},
      ["issued", "group", "#", "call", "state", "source"].map(text => h("th", {}, text)))),
    h("tbody", {}, calls.slice(0, 500).map(c => h("tr", {},
      h("td", {className: "num"}, c.created === null || c.created === undefined ? "" : clock(c.created)),
      h("td", {}, c.group.name), h("td", {className: "num"}, `${c.seq}`),
      h("td", {}, h("code", {}, callText(c.call))), h("td", {}, STATE[c.letter]),
      h("td", {}, siteText(c.site).length > 1
        ? h("details", {}, h("summary", {className: "mono"}, shortPath(siteText(c.site)[0])),
          h("pre", {}, siteText(c.site).join("\n")))
        : h("code", {}, shortPath(siteText(c.site)[0] || ""))))))))
      : h("p", {className: "dim"}, "No calls of this rank are on this page.")));
  if (scroll) document.getElementById("rank").scrollIntoView({behavior: "smooth", block: "nearest"});
}

document.title = `${report.verdict}: ${report.summary}`;
main.replaceChildren(header(), h("div", {className: "cards"}, culprits()),
  listing("Lacking to decide", report.lacking), listing("Next", report.next_steps, true), consequences());
if (data.groups.length) {
  main.append(h("section", {className: "card"}, h("h2", {}, "Ranks × calls"), controls(), legend(), board,
    data.left_out ? h("p", {className: "dim"}, `${data.left_out} groups are left out for room.`) : ""),
  data.origin && h("section", {className: "card"}, h("h2", {}, "Timeline"),
    h("p", {className: "meta"}, data.origin ? `+0 s is ${data.origin}, by each host's own clock.` : ""), lane));
}
main.append(rankBox, listing("Notes", [...report.findings.map(f => f.text), ...data.problems]));
if (guilty.size) { view.rank = report.culprits[0].rank; drawRank(false); }
drawGroup();
addEventListener("resize", drawGroup);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawGroup);
addEventListener("keydown", event => {
  if (event.key === "/" && document.activeElement.tagName !== "INPUT") {
    event.preventDefault();
    document.getElementById("search").focus();
  }
});
