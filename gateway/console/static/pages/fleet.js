// Groups, queues, memory by tier, fairness between tenants, alerts and the last self-attack.

import { html, useEffect, useRef, useState } from "../vendor/htm-preact.js";
import { causeOf, count, duration, percent, plural, short, shortName } from "../format.js";
import { Bar, Chart, Failure, Key, Notice, Stat } from "../parts.js";
import { getJson } from "../server.js";

const INTERVAL_MS = 2000;
const KEPT = 180;
const TIERS = { device: "Device", device_window: "Device, windows", device_snapshots: "Device, states", host: "Host", host_snapshots: "Host, states", storage: "Storage" };
const SERIES = {
  rows: [
    { label: "running", colour: "public" },
    { label: "waiting", colour: "tenant" },
  ],
  steps: [{ label: "steps/s", colour: "accent" }],
};

export function Fleet() {
  const [fleet, setFleet] = useState(null);
  const [error, setError] = useState(null);
  const [attempt, setAttempt] = useState(0);
  const history = useRef([]);
  useEffect(() => {
    let timer = 0;
    let gone = false;
    const load = async () => {
      try {
        const state = await getJson("/console/fleet");
        if (gone) return;
        const next = sample(state, history.current.at(-1));
        // A line has two ends, from the first answer on.
        const known = history.current.length ? history.current : [{ ...next, time: next.time - INTERVAL_MS / 1000 }];
        history.current = [...known.slice(1 - KEPT), next];
        setFleet(state);
        setError(null);
      } catch (failure) {
        if (gone) return;
        setError(failure);
        if (failure.status === 401 || failure.status === 403) return;
      }
      timer = setTimeout(load, INTERVAL_MS);
    };
    load();
    return () => {
      gone = true;
      clearTimeout(timer);
    };
  }, [attempt]);
  if (!fleet) return html`<h1>Fleet</h1>${error ? html`<${Failure} error=${error} retry=${() => setAttempt(attempt + 1)} />` : html`<p class="muted">Loading …</p>`}`;
  const samples = history.current;
  const column = (name) => samples.map((each) => each[name]);
  const groups = fleet.models.flatMap((model) => model.groups);
  const alive = groups.filter((group) => !group.error);
  return html`<h1>Fleet</h1>
    ${error && html`<${Notice} kind="error" title="No news from the gateway"><p>${error.message} It is asked again every ${INTERVAL_MS / 1000} s.</p><//>`}
    <${Alerts} alerts=${fleet.alerts} />
    <dl class="stats">
      <${Stat} label="Open requests" value=${count(fleet.open_requests)} />
      <${Stat} label="Running" value=${count(sum(alive, "running_rows"))} note="of ${plural(sum(alive, "max_rows"), "row")}" />
      <${Stat} label="Waiting" value=${count(sum(alive, "waiting_requests"))} />
      <${Stat} label="Groups ready" value=${alive.filter((group) => group.worker_group === "READY").length} note="of ${groups.length}" />
    </dl>
    <div class="columns">
      <section class="card"><${Chart} title="Rows and queue" data=${[column("time"), column("running"), column("waiting")]} series=${SERIES.rows} /></section>
      <section class="card"><${Chart} title="Steps of the engine" data=${[column("time"), column("rate")]} series=${SERIES.steps} /></section>
    </div>
    ${fleet.models.map((model) => html`<section aria-label="Model ${model.name}"><h2>${model.name}</h2>
      <div class="columns">${model.groups.map((group) => html`<${Group} group=${group} />`)}</div></section>`)}
    <${Fairness} groups=${alive} weights=${fleet.weights} />
    <${Attack} attack=${fleet.attack} />`;
}

const sum = (groups, name) => groups.reduce((total, group) => total + Number(group[name] ?? 0), 0);

function sample(fleet, before) {
  const groups = fleet.models.flatMap((model) => model.groups).filter((group) => !group.error);
  const time = Date.now() / 1000;
  const steps = sum(groups, "finished_steps");
  // A scheduler that starts again counts from 0.
  const made = before ? steps - before.steps : 0;
  return {
    time,
    steps,
    running: sum(groups, "running_rows"),
    waiting: sum(groups, "waiting_requests"),
    rate: before && made >= 0 ? Math.round((10 * made) / (time - before.time)) / 10 : 0,
  };
}

function Alerts({ alerts }) {
  if (!alerts.length) return html`<p class="calm" role="status"><span class="dot ok" aria-hidden="true"></span>No alerts: every service answers.</p>`;
  return html`<section class="alerts" aria-label="Alerts" role="status">
    ${alerts.map((alert) => html`<div class="alert ${alert.severity}"><strong>${alert.severity === "critical" ? "Critical" : "Warning"}</strong>
      <span><b title=${alert.about}>${shortName(alert.about)}</b> ${causeOf(alert.text)}</span></div>`)}</section>`;
}

// An engine that has made no progress for so long is worth a word; steps take milliseconds, long prompts seconds.
const SLOW_MS = 2000;

/** What the heartbeats of a rank say. */
export function rankState(rank) {
  if (rank.silent_heartbeats) return `no answer to ${plural(rank.silent_heartbeats, "heartbeat")}`;
  const age = Number(rank.engine_age_ms ?? 0);
  return age > SLOW_MS ? `no progress for ${duration(age / 1000)}` : "answers";
}

function Group({ group }) {
  const heading = html`<h3 title=${group.group}>Group <code>${shortName(group.group)}</code></h3>`;
  if (group.error) return html`<article class="card">${heading}<p><span class="dot bad" aria-hidden="true"></span>Away: ${causeOf(group.error)}</p></article>`;
  const isReady = group.worker_group === "READY";
  return html`<article class="card">${heading}
    <p><span class="dot ${isReady || group.worker_group === "SLEEPING" ? "ok" : "bad"}" aria-hidden="true"></span>Workers ${group.worker_group.toLowerCase()}${group.paused ? ", admission paused" : ""}
      <span class="muted"> · policy ${group.policy}, cache ${group.cache}</span></p>
    <dl class="pairs">
      <dt>Rows</dt><dd>${count(group.running_rows)} of ${count(group.max_rows)}</dd>
      <dt>Queue</dt><dd>${count(group.waiting_requests)}</dd>
      <dt>Steps</dt><dd>${short(group.finished_steps)}</dd>
      <dt>Retractions</dt><dd>${count(group.retractions)}</dd>
      <dt>Sessions</dt><dd>${count(group.sessions?.length)}</dd>
    </dl>
    ${group.ranks?.length > 0 && html`<table class="ranks"><caption class="visually-hidden">Ranks</caption><thead><tr><th scope="col">Rank</th><th scope="col">State</th><th scope="col" class="number">Open plans</th></tr></thead>
      <tbody>${group.ranks.map((rank) => html`<tr><th scope="row">${rank.rank}</th>
        <td><span class="dot ${rank.silent_heartbeats ? "bad" : "ok"}" aria-hidden="true"></span>${rankState(rank)}</td><td class="number">${rank.open_plans ?? "–"}</td></tr>`)}</tbody></table>`}
    ${(group.tiers ?? []).map((tier) => html`<${Tier} tier=${tier} page=${group.page_size_tokens} />`)}
  </article>`;
}

function Tier({ tier, page }) {
  const [capacity, free, soft, evictable, used] = ["capacity", "free", "soft_free", "evictable", "protected"].map((name) => Number(tier[`${name}_pages`]));
  const parts = [
    { label: "running", value: used, kind: "protected" },
    { label: "cached", value: evictable, kind: "evictable" },
    { label: "soft-free", value: soft, kind: "soft" },
  ];
  const label = TIERS[tier.tier] ?? tier.tier;
  return html`<div class="tier"><div class="row"><span>${label}</span><span class="muted">${percent((capacity - free) / capacity)} of ${short(capacity * page)} tokens</span></div>
    <${Bar} label="KV of the tier ${label}" parts=${parts} total=${capacity} />
    <p class="keys">${parts.map(({ label, value, kind }) => html`<${Key} kind=${kind}>${label} ${short(value * page)}<//> `)}</p></div>`;
}

/** Each tenant's share of rows and pages, and the share that its weight entitles it to among those active. */
export function shares(groups, weights) {
  const tenants = new Map();
  const of = (name) => {
    if (!tenants.has(name)) tenants.set(name, { name, rows: 0, waiting: 0, pages: 0, weight: Number(weights[name] ?? 1) });
    return tenants.get(name);
  };
  for (const group of groups) {
    for (const request of group.requests ?? []) {
      const tenant = of(request.view?.subject?.tenant ?? `#${request.fingerprint.slice(0, 8)}`);
      tenant[request.phase === "WAITING" ? "waiting" : "rows"] += 1;
    }
    for (const owner of group.owners ?? []) {
      if (owner.visibility === "VISIBILITY_PUBLIC") continue;
      const name = owner.view?.subject?.tenant ?? owner.tenant ?? `#${owner.fingerprint.slice(0, 8)}`;
      of(name).pages += Number(owner.device_pages) + Number(owner.host_pages);
    }
  }
  const all = [...tenants.values()];
  const total = (name) => all.reduce((sum, tenant) => sum + tenant[name], 0);
  const [rows, pages, weight] = ["rows", "pages", "weight"].map(total);
  return all
    .map((tenant) => ({ ...tenant, rowShare: tenant.rows / rows, pageShare: tenant.pages / pages, entitled: tenant.weight / weight }))
    .sort((one, other) => other.rows - one.rows || other.pages - one.pages);
}

function Fairness({ groups, weights }) {
  const tenants = shares(groups, weights);
  const hidden = groups.some((group) => (group.owners ?? []).some((owner) => owner.fingerprint && !owner.view && !owner.tenant));
  return html`<section class="card" aria-labelledby="fairness"><h2 id="fairness">Fairness between tenants</h2>
    ${tenants.length === 0
      ? html`<p class="muted">No tenant has requests or cached text now.</p>`
      : html`<div class="scroll" tabindex="0" role="region" aria-label="Table of tenants"><table><thead><tr><th scope="col">Tenant</th><th scope="col" class="number">Entitled to</th><th scope="col" class="number">Rows</th>
          <th scope="col" class="number">Waiting</th><th scope="col" class="number">Cached pages</th></tr></thead>
        <tbody>${tenants.slice(0, 50).map((tenant) => html`<tr><th scope="row">${tenant.name}</th><td class="number">${percent(tenant.entitled)}</td>
          <td class="number">${count(tenant.rows)} <small>${percent(tenant.rowShare)}</small></td><td class="number">${count(tenant.waiting)}</td>
          <td class="number">${count(tenant.pages)} <small>${percent(tenant.pageShare)}</small></td></tr>`)}</tbody></table></div>
        ${hidden && html`<p class="muted">Owners are shown by pseudonyms: the schedulers disclose names to gateways with scheduler.admin_token.</p>`}`}
  </section>`;
}

const VERDICTS = { leaks: "bad", unbounded: "bad", undecided: "unsure", closed: "ok", bounded: "ok" };

function Attack({ attack }) {
  const heading = html`<h2 id="attack">Last self-attack</h2>`;
  if (!attack)
    return html`<section class="card" aria-labelledby="attack">${heading}<p class="muted">No report is configured: run <code>pando attack --json FILE</code> on a schedule and set <code>gateway.console.attack_report</code>.</p></section>`;
  if (attack.error) return html`<section class="card" aria-labelledby="attack">${heading}<${Notice} kind="warning" title="The report cannot be read">${attack.error}<//></section>`;
  const { run } = attack;
  const age = Date.now() / 1000 - (run?.finished_unix_s ?? attack.written_unix_s);
  return html`<section class="card" aria-labelledby="attack">${heading}
    <p class="muted">${run ? "Finished" : "Written"} ${duration(age)} ago by <code>pando attack</code>${run ? `, which runs every ${duration(run.every_s)} and took ${count(run.requests)} requests` : ""}. AUC 0.5 is guessing.</p>
    <div class="scroll" tabindex="0" role="region" aria-label="Table of findings"><table><thead><tr><th scope="col">Mode</th><th scope="col">Attack</th><th scope="col">Verdict</th><th scope="col" class="number">AUC</th><th scope="col">Note</th></tr></thead>
      <tbody>${attack.findings.map((finding) => html`<tr><td>${finding.label}</td><th scope="row">${finding.metric}</th>
        <td><span class="dot ${VERDICTS[finding.verdict] ?? "unsure"}" aria-hidden="true"></span>${finding.verdict ?? "unfinished"}${finding.control ? " (control)" : ""}</td>
        <td class="number">${finding.value ?? "–"}</td><td>${finding.note}</td></tr>`)}</tbody></table></div></section>`;
}
