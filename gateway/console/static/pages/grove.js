// The live prefix caches: who may reuse which text, and why.

import { html, useEffect, useRef, useState } from "../vendor/htm-preact.js";
import { causeOf, count, moment, ownerName, plural, short, shortName } from "../format.js";
import { Drawing } from "../grove/drawing.js";
import { History } from "../grove/tree.js";
import { Bar, Failure, Key, Notice } from "../parts.js";
import { events, request } from "../server.js";
import { onThemeChange } from "../theme.js";

// Messages are applied for this long per frame; the rest waits for the next one.
const FRAME_MS = 8;
const PANEL_MS = 250;
const RECONNECT_MS = 1500;
const SHOWN_PREFIXES = 100;
const SHOWN_DECISIONS = 12;
const DECISIONS = new Map([
  ["promoted", "became shared"],
  ["demoted", "is no longer shared"],
  ["quarantined", "was hidden from some users"],
]);
const KEYS = [
  ["private", "one user"],
  ["tenant", "a tenant"],
  ["public", "everyone"],
  ["pinned", "pinned"],
  ["bad", "hidden from some"],
];
const DECISION_KINDS = new Set(DECISIONS.keys());

/** Why a node may be seen by those who may, in sentences. */
export function explain(data) {
  const said = [];
  const owner = ownerName(data.owner);
  if (data.visibility === "private") {
    said.push(`Only ${owner || "its owner"} can reuse it: text is private until ${data.required ? plural(data.required, "user") : "enough users"} have computed it themselves.`);
    if (data.no_promote) said.push("Its owner has excluded it from sharing.");
  } else {
    const who = data.visibility === "public" ? "Everyone" : `Every user of ${owner ? `the tenant ${owner}` : "its tenant"}`;
    if (data.pinned) said.push(`${who} can reuse it: the operator pinned it.`);
    else {
      const tenants = data.promoted_tenants ? ` of ${plural(data.promoted_tenants, "tenant")}` : "";
      said.push(`${who} can reuse it: ${plural(data.promoted_by ?? 0, "user")}${tenants} had computed it themselves by epoch ${data.promoted_epoch ?? "?"}, counted by keyed fingerprints${data.required ? `; ${count(data.required)} were required` : ""}.`);
    }
    if (data.creators) said.push(`${plural(data.creators, "user")} ${data.creators === 1 ? "has" : "have"} computed it until now.`);
    const hits = (data.hits ?? 0) + (data.previous_hits ?? 0);
    said.push(hits ? `Others reused it ${plural(hits, "time")} in this epoch and the one before, which saved ${plural(saved(data), "token")}.` : "No one else has reused it in this epoch or the one before.");
  }
  if (data.quarantined) said.push(`It is hidden from ${plural(data.quarantined, "user")} whose requests looked like probes.`);
  if (data.quarantined_tenants) said.push(`It is hidden from ${plural(data.quarantined_tenants, "tenant")}.`);
  if (data.generation) said.push(`It was demoted ${plural(data.generation, "time")} before.`);
  if (data.state === "soft_free") said.push("Its pages count as free, and can still be matched until they are taken.");
  if (data.state === "on_host") said.push("It is in host memory and would be loaded.");
  if (data.locks) said.push(`${plural(data.locks, "running request")} ${data.locks === 1 ? "needs" : "need"} it.`);
  return said;
}

const saved = (data) => ((data.hits ?? 0) + (data.previous_hits ?? 0)) * data.edge;
const AUDIENCE = { private: "its owner", tenant: "its tenant", public: "everyone" };

export function Grove({ about }) {
  const [model, setModel] = useState(about.models[0]?.name ?? "");
  const [attempt, setAttempt] = useState(0);
  const [failure, setFailure] = useState(null);
  const [away, setAway] = useState(null);
  const [, redraw] = useState(0);
  const state = useRef(null);
  state.current ??= { history: new History(), pending: [], focus: null, selected: null, dirty: true };

  useEffect(() => {
    const abort = new AbortController();
    state.current = { history: new History(), pending: [], focus: null, selected: null, dirty: true };
    follow(model, abort.signal, state.current, { setFailure, setAway });
    return () => abort.abort();
  }, [model, attempt]);
  useEffect(() => {
    const timer = setInterval(() => redraw((number) => number + 1), PANEL_MS);
    return () => clearInterval(timer);
  }, []);

  const { history, selected } = state.current;
  const { tree } = history;
  const update = (change) => {
    change(state.current);
    state.current.dirty = true;
    redraw((number) => number + 1);
  };
  if (failure) return html`<h1>Grove</h1><${Failure} error=${failure} retry=${() => (setFailure(null), setAttempt(attempt + 1))} />`;
  const node = selected && tree.nodes.get(selected.key);
  return html`<div class="title"><h1>Grove</h1>
      ${about.models.length > 1 && html`<label>Model <select value=${model} onChange=${(event) => setModel(event.target.value)}>${about.models.map(({ name }) => html`<option>${name}</option>`)}</select></label>`}
      <p class="muted" data-nodes=${tree.size} data-changes=${history.changes}>${plural(tree.size, "prefix", "prefixes")} · ${history.loading.size ? "loading" : plural(history.changes, "change")}</p></div>
    ${away && html`<${Notice} kind="warning" title="Not live"><p>${away} The console connects again by itself.</p><//>`}
    <${Canvas} state=${state} update=${update} />
    <${Slider} history=${history} update=${update} />
    <p class="keys">${KEYS.map(([kind, label]) => html`<${Key} kind=${kind}>${label}<//> `)}</p>
    <div class="columns">
      <${Detail} node=${node} focus=${state.current.focus} zoom=${(node) => update((now) => (now.focus = node))} />
      <${Memory} totals=${tree.totals} />
    </div>
    <div class="columns">
      <${Prefixes} tree=${tree} select=${(node) => update((now) => (now.selected = node))} selected=${node} />
      <${Decisions} history=${history} />
    </div>`;
}

/** Read the stream until the page is left; connect again when it breaks. */
async function follow(model, signal, state, { setFailure, setAway }) {
  while (!signal.aborted) {
    try {
      const response = await request(`/console/grove?model=${encodeURIComponent(model)}`, { signal });
      for await (const data of events(response)) {
        const message = JSON.parse(data);
        if (message.error) setAway(message.group ? `${shortName(message.group)}: ${causeOf(message.error)}.` : message.error);
        else {
          setAway(null);
          state.pending.push(message);
        }
      }
      if (!signal.aborted) setAway("The gateway ended the stream.");
    } catch (error) {
      if (error.name === "AbortError") return;
      if ([401, 403, 404].includes(error.status)) {
        setFailure(error);
        return;
      }
      setAway(error.message);
    }
    await new Promise((resolve) => setTimeout(resolve, RECONNECT_MS));
  }
}

function Canvas({ state, update }) {
  const place = useRef();
  const drawing = useRef();
  useEffect(() => {
    drawing.current = new Drawing(place.current);
    const resized = new ResizeObserver(([entry]) => {
      drawing.current.resize(entry.contentRect.width, entry.contentRect.height);
      state.current.dirty = true;
    });
    resized.observe(place.current);
    const recolour = () => {
      drawing.current.readColours();
      state.current.dirty = true;
    };
    const themed = onThemeChange(recolour);
    let frame = requestAnimationFrame(function next() {
      work(state.current, drawing.current);
      frame = requestAnimationFrame(next);
    });
    return () => {
      cancelAnimationFrame(frame);
      resized.disconnect();
      themed();
    };
  }, []);
  const pick = (event) => {
    const bounds = place.current.getBoundingClientRect();
    return drawing.current.at(event.clientX - bounds.left, event.clientY - bounds.top);
  };
  const keys = (event) => {
    const { selected, focus, history } = state.current;
    const start = focus ?? history.tree.root;
    const next = step(event.key, selected, start);
    if (event.key === "Enter" && selected) update((now) => (now.focus = selected));
    else if (event.key === "Escape") update((now) => (now.focus = focus?.parent?.data ? focus.parent : null));
    else if (next) update((now) => (now.selected = next));
    else return;
    event.preventDefault();
  };
  return html`<canvas class="grove" ref=${place} tabindex="0" role="application" aria-roledescription="tree" aria-describedby="grove-keys"
      aria-label="Prefix tree. The table below lists what is shared."
      onClick=${(event) => update((now) => (now.selected = pick(event)))}
      onDblClick=${(event) => update((now) => (now.focus = pick(event)))} onKeyDown=${keys}></canvas>
    <p id="grove-keys" class="visually-hidden">Arrow keys move between prefixes, Enter shows only a prefix's branch, Escape leaves it.</p>`;
}

/** Apply what has arrived, and draw if anything changed; measured, so that a test can bound it. */
function work(state, drawing) {
  if (!state.pending.length && !state.dirty) return;
  const started = performance.now();
  while (state.pending.length && performance.now() - started < FRAME_MS) {
    state.history.receive(state.pending.shift(), Date.now());
    state.dirty = true;
  }
  const { tree } = state.history;
  if (state.focus && !tree.nodes.has(state.focus.key)) state.focus = null;
  if (drawing.width) drawing.draw(tree, state.focus ?? tree.root, state.selected);
  state.dirty = false;
  const took = performance.now() - started;
  state.frames = [...(state.frames ?? []).slice(-599), took];
  drawing.canvas.dataset.frames = state.frames.length;
  drawing.canvas.frames = state.frames;
}

function step(key, selected, start) {
  const first = (node) => node.children().next().value ?? null;
  let top = start;
  while (top && !top.data) top = first(top);
  if (!selected?.parent) return key.startsWith("Arrow") ? top : null;
  const siblings = [...selected.parent.children()];
  const index = siblings.indexOf(selected);
  if (key === "ArrowRight") return first(selected);
  if (key === "ArrowLeft") return selected.parent.data ? selected.parent : null;
  if (key === "ArrowDown") return siblings[index + 1] ?? null;
  if (key === "ArrowUp") return siblings[index - 1] ?? null;
  return null;
}

function Slider({ history, update }) {
  const { log, at, isLive, isBefore } = history;
  const shown = log[at - 1];
  const when = isLive ? "now" : shown ? moment(shown.time) : "the beginning";
  // Without changes there is one position, the present, at the right end.
  const first = log.length ? 0 : -1;
  return html`<div class="row slider"><label class="grow">Time: ${when}
      <input type="range" min=${first} max=${log.length} value=${at} aria-valuetext=${when} disabled=${!log.length}
        onInput=${(event) => update((now) => now.history.show(Number(event.target.value)))} /></label>
    <button type="button" disabled=${isLive} onClick=${() => update((now) => now.history.show(Infinity))}>Live</button></div>
    ${log.some((event) => event.isPast) && html`<p class="muted">${isBefore ? "This is from before the page was opened" : "Before the page was opened"}: only decisions of that time are known, not which prefixes were added or dropped.</p>`}`;
}

function Detail({ node, focus, zoom }) {
  if (!node)
    return html`<section class="card" aria-labelledby="detail"><h2 id="detail">Prefix</h2><p class="muted">Select a prefix in the picture or in the table to see who may reuse it, and why.</p></section>`;
  const { data } = node;
  return html`<section class="card" aria-labelledby="detail"><h2 id="detail">Prefix ${data.id}</h2>
    <p><span class="tag ${data.visibility}">${AUDIENCE[data.visibility]}</span> ${plural(data.edge, "token")}, up to token ${count(data.depth)}</p>
    ${explain(data).map((sentence) => html`<p>${sentence}</p>`)}
    <dl class="pairs"><dt>Owner</dt><dd>${data.visibility === "public" ? "none" : ownerName(data.owner)}</dd>
      <dt>Pages</dt><dd>${count(data.pages)} on the device, ${count(data.host_pages)} on the host</dd><dt>State</dt><dd>${data.state.replace("_", "-")}</dd></dl>
    <button type="button" onClick=${() => zoom(focus === node ? null : node)}>${focus === node ? "Show everything" : "Show only this branch"}</button>
  </section>`;
}

function Memory({ totals }) {
  const part = (name, label) => ({ label, value: totals.visibility.get(name)?.pages ?? 0, kind: name });
  const levels = [part("private", "one user"), part("tenant", "a tenant"), part("public", "everyone")];
  const tenants = [...totals.tenant].sort(([, one], [, other]) => other.pages - one.pages).slice(0, 6);
  const most = Math.max(1, ...tenants.map(([, sums]) => sums.pages));
  return html`<section class="card" aria-labelledby="memory"><h2 id="memory">Memory</h2>
    <${Bar} label="Pages by who may reuse them" parts=${levels} />
    <p class="keys">${levels.map(({ label, value, kind }) => html`<${Key} kind=${kind}>${label} ${short(value)}<//> `)}</p>
    <dl class="pairs"><dt>On devices</dt><dd>${plural(totals.pages.device, "page")}</dd><dt>On hosts</dt><dd>${plural(totals.pages.host, "page")}</dd></dl>
    <h3>By tenant</h3>
    ${tenants.map(([name, sums]) => html`<div class="row"><span class="name">${name}</span><span class="muted">${plural(sums.pages, "page")}, ${short(sums.tokens)} tokens</span></div>
      <${Bar} label="Pages of ${name}" parts=${[{ label: name, value: sums.pages, kind: "evictable" }]} total=${most} />`)}
  </section>`;
}

function Prefixes({ tree, select, selected }) {
  const shared = [];
  const visit = (node) => {
    for (const child of node.shared) {
      shared.push(child);
      visit(child);
    }
  };
  // Text below a shared prefix is shared, or private; nothing shared lies below what is private.
  for (const root of tree.groups.values()) visit(root);
  shared.sort((one, other) => saved(other.data) - saved(one.data) || other.data.edge - one.data.edge);
  return html`<section class="card" aria-labelledby="prefixes"><h2 id="prefixes">Shared prefixes</h2>
    ${shared.length === 0
      ? html`<p class="muted">Nothing is shared yet. Text becomes shared once enough users of a tenant have computed it themselves, within a second or so.</p>`
      : html`<div class="scroll" tabindex="0" role="region" aria-label="Table of shared prefixes"><table><thead><tr><th scope="col">Prefix</th><th scope="col">For</th><th scope="col">Evidence</th><th scope="col" class="number">Tokens</th><th scope="col" class="number">Saved</th></tr></thead>
        <tbody>${shared.slice(0, SHOWN_PREFIXES).map((node) => html`<tr key=${node.key} aria-selected=${null} class=${node === selected ? "selected" : ""}>
          <th scope="row"><button type="button" class="link" aria-pressed=${node === selected} onClick=${() => select(node)}>${node.data.id}</button></th>
          <td><span class="tag ${node.data.visibility}">${node.data.visibility === "tenant" ? ownerName(node.data.owner) : "everyone"}</span></td>
          <td>${evidence(node.data)}</td><td class="number">${count(node.data.edge)}</td><td class="number">${short(saved(node.data))}</td></tr>`)}</tbody></table></div>
        ${shared.length > SHOWN_PREFIXES && html`<p class="muted">and ${count(shared.length - SHOWN_PREFIXES)} more</p>`}`}
  </section>`;
}

function evidence(data) {
  const parts = [data.pinned ? "pinned" : `${data.required ? `${count(data.promoted_by)} of ${plural(data.required, "user")}` : plural(data.promoted_by ?? 0, "user")}, epoch ${data.promoted_epoch ?? "?"}`];
  if (data.quarantined) parts.push(`hidden from ${data.quarantined}`);
  if (data.generation) parts.push(`demoted ${plural(data.generation, "time")}`);
  return parts.join("; ");
}

function Decisions({ history }) {
  const decisions = history.latest(DECISION_KINDS, SHOWN_DECISIONS);
  return html`<section class="card" aria-labelledby="decisions"><h2 id="decisions">Decisions</h2>
    ${decisions.length === 0
      ? html`<p class="muted">Nothing has been shared, demoted or hidden yet.</p>`
      : html`<ol class="decisions" aria-live="polite">${decisions.map(({ time, kind, id, data, sequence, group }) => html`<li key=${`${group}:${sequence}`}><time>${moment(time)}</time>
          <span>Prefix ${id} ${DECISIONS.get(kind)}${kind === "promoted" ? `: ${evidence(data)}` : ""}</span></li>`)}</ol>`}
  </section>`;
}
