// Parts that pages share.

import { html, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import uPlot from "./vendor/uplot.js";
import { credential } from "./server.js";
import { coloursOf, onThemeChange } from "./theme.js";

export { html };

export function Notice({ kind = "info", title, children }) {
  const role = kind === "error" ? "alert" : "status";
  return html`<div class="notice ${kind}" role=${role}><strong>${title}</strong><div>${children}</div></div>`;
}

/** A page's error: asks for a credential where one is needed. */
export function Failure({ error, retry }) {
  if (error.status === 401 || error.status === 403)
    return html`<${Notice} kind="warning" title="This page needs a credential">
      <p>${error.message}</p>
      <${SignIn} done=${retry} />
    <//>`;
  return html`<${Notice} kind="error" title="That did not work"><p>${error.message}</p>
    <button type="button" onClick=${retry}>Try again</button><//>`;
}

export function SignIn({ done }) {
  const [key, setKey] = useState("");
  const send = (event) => {
    event.preventDefault();
    credential.set(key.trim());
    done();
  };
  return html`<form class="row sign-in" onSubmit=${send}>
    <label class="grow">API key
      <input type="password" autocomplete="off" value=${key} onInput=${(event) => setKey(event.target.value)} />
    </label>
    <button type="submit">Use this key</button>
  </form>`;
}

export function Stat({ label, value, note }) {
  return html`<div class="stat"><dt>${label}</dt><dd>${value}${note ? html`<small>${note}</small>` : null}</dd></div>`;
}

/** A bar of parts: [{label, value, kind}]; its meaning is also written in words. */
export function Bar({ label, parts, total }) {
  const whole = total ?? parts.reduce((sum, part) => sum + part.value, 0);
  const words = parts.map((part) => `${part.label} ${whole ? ((100 * part.value) / whole).toFixed(0) : 0} %`).join(", ");
  let x = 0;
  return html`<svg class="bar" viewBox="0 0 1000 10" preserveAspectRatio="none" role="img" aria-label="${label}: ${words}">
    <rect class="empty" width="1000" height="10" />
    ${parts.map((part) => {
      const width = whole ? (1000 * part.value) / whole : 0;
      const rect = html`<rect class=${part.kind} x=${x} width=${width} height="10"><title>${part.label}</title></rect>`;
      x += width;
      return rect;
    })}
  </svg>`;
}

/** What a colour of a bar or chart means. */
export function Key({ kind, children }) {
  return html`<span class="key"><i class="swatch ${kind}"></i>${children}</span>`;
}

const SHOWN_S = 120;
// Half of a label such as 23:59:59, which is centred below the end of the line.
const LABEL_PX = 30;

function lastMinutes(_, low, high) {
  const end = high ?? Date.now() / 1000;
  return [Math.min(low ?? end, end - SHOWN_S), end];
}

const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString([], { hour12: false });

/** A chart of series over time; `data` is uPlot's [times, values...]. */
export function Chart({ title, data, series, height = 132 }) {
  const place = useRef();
  const plot = useRef();
  const [version, setVersion] = useState(0);
  useEffect(() => onThemeChange(() => setVersion((number) => number + 1)), []);
  useEffect(() => {
    const colours = coloursOf(["muted", "line", ...series.map((each) => each.colour)]);
    const axis = { stroke: colours.muted, grid: { stroke: colours.line, width: 1 }, ticks: { show: false } };
    const options = {
      width: place.current.clientWidth,
      height,
      legend: { show: false },
      padding: [8, LABEL_PX, 0, 0],
      cursor: { show: false },
      axes: [{ ...axis, size: 28, space: 90, values: (_, splits) => splits.map(clock) }, { ...axis, size: 44 }],
      // The last minutes, so that few samples are not stretched over the whole width.
      scales: { x: { range: lastMinutes }, y: { range: (_, low, high) => [0, Math.max(high, 1)] } },
      series: [{}, ...series.map(({ label, colour: name }) => ({ label, stroke: colours[name], width: 2, points: { show: false } }))],
    };
    plot.current = new uPlot(options, data, place.current);
    const resized = new ResizeObserver(([entry]) => plot.current.setSize({ width: entry.contentRect.width, height }));
    resized.observe(place.current);
    return () => {
      resized.disconnect();
      plot.current.destroy();
    };
  }, [series, version]);
  useEffect(() => plot.current?.setData(data), [data]);
  const last = series.map(({ label }, index) => `${label} ${data[index + 1].at(-1) ?? 0}`).join(", ");
  return html`<figure class="chart"><figcaption>${title}
      <span class="legend">${series.map(({ label, colour: name }) => html`<${Key} kind=${name}>${label}<//>`)}</span></figcaption>
    <div ref=${place} role="img" aria-label="${title}: ${last}"></div></figure>`;
}
