// Where the time of one request went, as a waterfall, and what the cache held of it.

import { html, useEffect, useState } from "../vendor/htm-preact.js";
import { count, duration, plural } from "../format.js";
import { Failure, Notice, Stat } from "../parts.js";
import { getJson } from "../server.js";

// While a request runs, it is asked for again.
const INTERVAL_MS = 1000;
const PHASES = {
  tokenize: "Tokenize",
  queue: "Queue",
  load: "Load",
  prefill: "Prefill",
  decode: "Decode",
  deliver: "Deliver",
};
const MEANING = {
  tokenize: "from the parsed request to the scheduler",
  queue: "waiting for a row",
  load: "copying cached text to the device",
  prefill: "computing the part of the prompt that was not cached",
  decode: "generating, token by token",
  deliver: "decoding into text, and the client's reading",
};
const WAITS = {
  turn: "its turn",
  prefix: "another request of the same user that computed the same text",
  load: "its pages from host memory or storage",
  memory: "free pages",
  grammar: "its grammar, after workers had started again",
  adapter: "a slot for its adapter",
};

export function Explain({ argument }) {
  const [id, setId] = useState(argument ?? "");
  const [timeline, setTimeline] = useState(null);
  const [error, setError] = useState(null);
  const [attempt, setAttempt] = useState(0);
  useEffect(() => setId(argument ?? ""), [argument]);
  useEffect(() => {
    setTimeline(null);
    setError(null);
    if (!argument) return undefined;
    let timer = 0;
    let gone = false;
    const load = async () => {
      try {
        const found = await getJson(`/v1/requests/${encodeURIComponent(argument)}/timeline`);
        if (gone) return;
        setTimeline(found);
        setError(null);
        if (found.ended_at === null) timer = setTimeout(load, INTERVAL_MS);
      } catch (failure) {
        if (!gone) setError(failure);
      }
    };
    load();
    return () => {
      gone = true;
      clearTimeout(timer);
    };
  }, [argument, attempt]);
  const send = (event) => {
    event.preventDefault();
    const next = `#explain/${encodeURIComponent(id.trim())}`;
    if (location.hash === next) setAttempt(attempt + 1);
    else location.hash = next;
  };
  return html`<h1>Explain a request</h1>
    <form class="row" onSubmit=${send}>
      <label class="grow">Id of the response, for example chatcmpl-…<input value=${id} autocomplete="off" spellcheck=${false} onInput=${(event) => setId(event.target.value)} /></label>
      <button type="submit" disabled=${!id.trim()}>Explain</button>
    </form>
    ${error && (error.status === 404
      ? html`<${Notice} kind="warning" title="Not found"><p>${error.message}</p><//>`
      : html`<${Failure} error=${error} retry=${() => setAttempt(attempt + 1)} />`)}
    ${timeline
      ? html`<${Timeline} timeline=${timeline} />`
      : !error && html`<p class="muted hint">Each answer in the chat has a link here. You can explain your own recent requests; administrators can explain all.</p>`}`;
}

function Timeline({ timeline }) {
  const { received_at: start, first_token_at: first, ended_at: ended, usage, phases } = timeline;
  const now = Date.now() / 1000;
  const end = Math.max(ended ?? now, start + 0.001, ...phases.map((phase) => phase.end ?? start));
  return html`<dl class="stats">
      <${Stat} label="Status" value=${timeline.status} note=${timeline.error} />
      <${Stat} label="First token" value=${first === null ? "–" : duration(first - start)} />
      <${Stat} label="Whole request" value=${ended === null ? "running" : duration(ended - start)} />
      ${usage && html`<${Stat} label="Charged" value=${count(usage.charged_tokens)} note="tokens" />`}
    </dl>
    ${timeline.incomplete && html`<${Notice} kind="warning" title="Incomplete"><p>${timeline.incomplete}</p><//>`}
    <section class="card" aria-labelledby="waterfall"><h2 id="waterfall">${timeline.model}</h2>
      <ol class="waterfall">${phases.map((phase) => html`<${Phase} phase=${phase} start=${start} span=${end - start} end=${end} />`)}</ol>
    </section>
    <div class="columns">
      <${Found} phases=${phases} usage=${usage} />
      <section class="card" aria-labelledby="ids"><h2 id="ids">Ids</h2><dl class="pairs">
        <dt>Response</dt><dd><code>${timeline.id}</code></dd>
        ${timeline.trace_id && html`<dt>Trace</dt><dd><code>${timeline.trace_id}</code></dd>`}
        <dt>Received</dt><dd>${new Date(start * 1000).toLocaleString()}</dd>
        <dt>Resubmissions</dt><dd>${count(timeline.resubmissions)}${timeline.resubmissions ? " after a service failed" : ""}</dd>
      </dl></section>
    </div>`;
}

/** A phase in words: what it is, why it waited, what it found and made. */
export function details(phase) {
  const said = [phase.after_retraction ? "again, as its row was taken for others" : MEANING[phase.name] ?? ""];
  if (phase.waited_for) said.push(`waited for ${WAITS[phase.waited_for] ?? phase.waited_for}`);
  if (phase.cached?.tokens) said.push(`${plural(phase.cached.tokens, "token")} cached`);
  if (phase.output_tokens) said.push(plural(phase.output_tokens, "token"));
  if (phase.finish_reason) said.push(`ended: ${phase.finish_reason}`);
  return said.filter(Boolean).join(" · ");
}

function Phase({ phase, start, span, end }) {
  const until = phase.end ?? end;
  const left = Math.min(100, Math.max(0, (100 * (phase.start - start)) / span));
  const width = Math.max(0.3, Math.min(100 - left, (100 * (until - phase.start)) / span));
  return html`<li><div class="row"><strong>${PHASES[phase.name] ?? phase.name}${phase.choice ? ` ${phase.choice + 1}` : ""}</strong>
      <span class="muted what">${details(phase)}</span><span class="number">${phase.end === null ? "running" : duration(until - phase.start)}</span></div>
    <div class="track" aria-hidden="true"><div class="span ${phase.name}" style=${{ left: `${left}%`, width: `${width}%` }}></div></div></li>`;
}

function Found({ phases, usage }) {
  const found = phases.flatMap((phase) => (phase.cached ? rules(phase.cached) : []));
  return html`<section class="card" aria-labelledby="found"><h2 id="found">From the cache</h2>
    ${found.length === 0
      ? html`<p class="muted">Nothing of the prompt was found in what this request may see.</p>`
      : html`<dl class="pairs">${found.map(({ tokens, rule }) => html`<dt>${plural(tokens, "token")}</dt><dd>${rule}</dd>`)}</dl>`}
    ${usage && html`<p class="muted">${plural(usage.prompt_tokens, "token")} in the prompt, ${plural(usage.completion_tokens ?? 0, "token")} in the answer.</p>`}
  </section>`;
}

/** Under which rules tokens were found, and where they were. */
export function rules({ tokens, public_tokens: ofAll = 0, tenant_tokens: ofTenant = 0, host_tokens: onHost = 0, storage_tokens: stored = 0 }) {
  return [
    { tokens: ofAll, rule: "shared with everyone" },
    { tokens: ofTenant, rule: "shared within the tenant" },
    { tokens: tokens - ofAll - ofTenant, rule: "computed for this user before" },
    { tokens: onHost - stored, rule: "of these were loaded from host memory" },
    { tokens: stored, rule: "of these were loaded from storage" },
  ].filter((each) => each.tokens > 0);
}
