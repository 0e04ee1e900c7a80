// A conversation with a model: streamed, stopped, edited, repeated; images; tools whose results are typed in.

import { html, useEffect, useRef, useState } from "../vendor/htm-preact.js";
import { count, duration } from "../format.js";
import { Markdown } from "../markdown.js";
import { Notice } from "../parts.js";
import { events, request } from "../server.js";

const DEFAULTS = { system: "", temperature: "0.7", top_p: "", max_tokens: "512", seed: "", tools: [], schema: "", user: "" };

/** The body of a request, and what is wrong with the settings. */
export function bodyOf(model, settings, messages) {
  const body = { model, messages, stream: true, stream_options: { include_usage: true } };
  if (settings.system.trim()) body.messages = [{ role: "system", content: settings.system }, ...messages];
  for (const name of ["temperature", "top_p", "max_tokens", "seed"]) {
    if (settings[name].trim() === "") continue;
    body[name] = Number(settings[name]);
    if (!Number.isFinite(body[name])) throw new Error(`${name} must be a number.`);
  }
  if (settings.user.trim()) body.user = settings.user.trim();
  if (settings.tools.length) body.tools = settings.tools.map(toolOf);
  if (settings.schema.trim()) {
    const schema = parsed("JSON schema", settings.schema);
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  }
  return body;
}

function toolOf({ name, description, parameters }, index) {
  if (!name.trim()) throw new Error(`Tool ${index + 1} has no name.`);
  const called = { name: name.trim() };
  if (description.trim()) called.description = description.trim();
  if (parameters.trim()) called.parameters = parsed(`Parameters of ${called.name}`, parameters);
  return { type: "function", function: called };
}

function parsed(what, text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${what}: ${error.message}`);
  }
}

/** Add a chunk's delta to a message; returns the new message. */
export function withDelta(message, delta) {
  const next = { ...message };
  if (delta.content) next.content = (next.content ?? "") + delta.content;
  const reasoning = delta.reasoning_content ?? delta.reasoning;
  if (reasoning) next.reasoning = (next.reasoning ?? "") + reasoning;
  for (const call of delta.tool_calls ?? []) {
    const calls = [...(next.tool_calls ?? [])];
    const known = calls[call.index] ?? { id: "", type: "function", function: { name: "", arguments: "" } };
    calls[call.index] = {
      ...known,
      id: call.id ?? known.id,
      function: {
        name: known.function.name + (call.function?.name ?? ""),
        arguments: known.function.arguments + (call.function?.arguments ?? ""),
      },
    };
    next.tool_calls = calls;
  }
  return next;
}

// What goes to the model; figures and reasoning stay here.
const sent = ({ role, content, pictures, tool_calls, tool_call_id }) => ({
  role,
  content: pictures?.length ? withPictures(content, pictures) : (content ?? null),
  ...(tool_calls && { tool_calls }),
  ...(tool_call_id && { tool_call_id }),
});

const PICTURE_TYPES = ["image/jpeg", "image/png", "image/webp", "image/gif"];

/** The content of a message with pictures before its text. */
export function withPictures(text, pictures) {
  const parts = pictures.map(({ url }) => ({ type: "image_url", image_url: { url } }));
  return text ? [...parts, { type: "text", text }] : parts;
}

/** Read a file to attach: its data URL for the model, and a URL of this page to show it. */
function readPicture(file, limits) {
  if (!PICTURE_TYPES.includes(file.type)) throw new Error(`${file.name} is not a JPEG, PNG, WebP or GIF image.`);
  if (file.size > limits.max_file_bytes) throw new Error(`${file.name} has ${count(file.size)} bytes, and may have ${count(limits.max_file_bytes)}.`);
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve({ name: file.name, url: reader.result, shown: URL.createObjectURL(file) });
    reader.onerror = () => reject(new Error(`${file.name} cannot be read.`));
    reader.readAsDataURL(file);
  });
}

export function Chat({ about }) {
  const models = about.models.filter((model) => model.generates);
  const [model, setModel] = useState(models[0]?.name ?? "");
  const [settings, setSettings] = useState(DEFAULTS);
  const [messages, setMessages] = useState([]);
  const [draft, setDraft] = useState("");
  const [pictures, setPictures] = useState([]);
  const [running, setRunning] = useState(null);
  const [failure, setFailure] = useState(null);
  const [said, setSaid] = useState("");
  const composer = useRef();
  const picker = useRef();
  const end = useRef();

  useEffect(() => end.current?.scrollIntoView({ block: "end" }), [messages.length, running?.frame]);

  async function answer(history) {
    setFailure(null);
    let body;
    try {
      body = bodyOf(model, settings, history.map(sent));
    } catch (error) {
      setMessages(history);
      setFailure(error);
      return;
    }
    const abort = new AbortController();
    const started = performance.now();
    let message = { role: "assistant", content: "" };
    const figures = { first: null, tokens: 0 };
    let frame = 0;
    // Redrawn once per frame, however fast tokens arrive.
    const show = () => {
      frame ||= requestAnimationFrame(() => {
        frame = 0;
        setMessages([...history, message]);
      });
    };
    setMessages([...history, message]);
    setRunning(abort);
    setSaid("The model answers.");
    try {
      const response = await request("/v1/chat/completions", { body, signal: abort.signal });
      for await (const data of events(response)) {
        if (data === "[DONE]") break;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Error(chunk.error.message);
        message = { ...message, id: chunk.id };
        const choice = chunk.choices?.[0];
        if (choice) {
          const before = message;
          message = withDelta(message, choice.delta ?? {});
          if (message.content !== before.content || message.tool_calls) {
            figures.first ??= performance.now();
            figures.tokens += 1;
          }
          if (choice.finish_reason) message.finish = choice.finish_reason;
        }
        if (chunk.usage) message.usage = chunk.usage;
        show();
      }
      setSaid("The answer is complete.");
    } catch (error) {
      if (error.name === "AbortError") {
        message = { ...message, finish: "stopped" };
        setSaid("Stopped.");
      } else setFailure(error);
    } finally {
      cancelAnimationFrame(frame);
      const ended = performance.now();
      message.figures = {
        wait: figures.first === null ? null : (figures.first - started) / 1000,
        rate: rateOf(message.usage?.completion_tokens ?? figures.tokens, figures.first, ended),
      };
      const isSilent = !message.content && !message.tool_calls && !message.reasoning;
      setMessages(isSilent ? history : [...history, message]);
      setRunning(null);
      composer.current?.focus();
    }
  }

  const send = (event) => {
    event?.preventDefault();
    if (running || isEmpty) return;
    const history = [...messages, { role: "user", content: draft, pictures }];
    setDraft("");
    setPictures([]);
    answer(history);
  };
  const edit = (index) => {
    setDraft(messages[index].content);
    setPictures(messages[index].pictures ?? []);
    setMessages(messages.slice(0, index));
    composer.current.focus();
  };
  const retry = (index) => answer(messages.slice(0, index));
  const keys = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
  };
  const chosen = models.find(({ name, adapters }) => name === model || adapters.includes(model));
  const { images: limits, price } = chosen ?? {};
  const isEmpty = !draft.trim() && !pictures.length;
  const attach = async (files) => {
    setFailure(null);
    try {
      const added = await Promise.all([...files].map((file) => readPicture(file, limits)));
      setPictures((known) => [...known, ...added]);
      setSaid(`${added.length} attached.`);
    } catch (error) {
      setFailure(error);
    }
    composer.current?.focus();
  };
  // Pasted and dropped files; pasted text stays text.
  const take = (event) => {
    const files = (event.clipboardData ?? event.dataTransfer).files;
    if (!limits || !files.length) return;
    event.preventDefault();
    attach(files);
  };
  const give = (results) => answer([...messages, ...results]);

  if (!models.length) return html`<h1>Chat</h1><${Notice} title="No model here generates text" />`;
  const last = messages.at(-1);
  return html`<div class="chat">
    <h1 class="visually-hidden">Chat</h1>
    <${Settings} about=${about} models=${models} model=${model} setModel=${setModel} settings=${settings} setSettings=${setSettings} />
    <section class="thread" aria-label="Conversation">
      ${messages.length === 0 &&
      html`<div class="empty-thread"><h2>Ask ${model} something</h2>
        <p>Prompts that several people of a tenant send are computed once. Each answer says how many of its tokens were cached.</p></div>`}
      ${messages.map((message, index) => html`<${Message} key=${index} message=${message} price=${price} isRunning=${running && index === messages.length - 1}
        edit=${!running && (() => edit(index))} retry=${!running && (() => retry(index))} />`)}
      ${!running && last?.role === "assistant" && last.tool_calls && html`<${ToolResults} calls=${last.tool_calls} give=${give} />`}
      ${failure && html`<${Notice} kind="error" title="The request failed"><p>${failure.message}</p>
        ${messages.length > 0 && html`<button type="button" onClick=${() => answer(messages)}>Try again</button>`}<//>`}
      <div ref=${end}></div>
    </section>
    <p class="visually-hidden" role="status">${said}</p>
    <form class="composer" onSubmit=${send} onDragOver=${(event) => limits && event.preventDefault()} onDrop=${take}>
      ${pictures.length > 0 &&
      html`<${Pictures} pictures=${pictures} remove=${(index) => setPictures(pictures.filter((_, each) => each !== index))} />`}
      ${limits &&
      html`<input ref=${picker} type="file" hidden multiple accept=${PICTURE_TYPES.join(",")}
          onChange=${(event) => { attach(event.target.files).then(() => { picker.current.value = ""; }); }} />
        <button type="button" class="quiet" disabled=${Boolean(running)} onClick=${() => picker.current.click()}>Attach image</button>`}
      <label class="visually-hidden" for="draft">Message</label>
      <textarea id="draft" ref=${composer} rows="2" placeholder="Message" value=${draft} onInput=${(event) => setDraft(event.target.value)} onKeyDown=${keys} onPaste=${take}></textarea>
      ${running
        ? html`<button type="button" class="stop" onClick=${() => running.abort()}>Stop</button>`
        : html`<button type="submit" disabled=${isEmpty}>Send</button>`}
    </form>
  </div>`;
}

function rateOf(tokens, first, ended) {
  const seconds = first === null ? 0 : (ended - first) / 1000;
  return tokens > 1 && seconds > 0 ? (tokens - 1) / seconds : null;
}

/** Attached pictures, which can be removed before they are sent. */
function Pictures({ pictures, remove }) {
  return html`<ul class="pictures" aria-label="Images">
    ${pictures.map(({ name, shown }, index) => html`<li key=${shown}><img src=${shown} alt=${name} />
      ${remove && html`<button type="button" class="quiet" aria-label="Remove ${name}" onClick=${() => remove(index)}>Remove</button>`}</li>`)}
  </ul>`;
}

const NAMES = { user: "You", assistant: "Model", tool: "Tool result" };

/** What an answer cost, as text, at prices for a million tokens. */
export function costOf(usage, price) {
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  const input = (usage.prompt_tokens - cached) * price.input + cached * (price.cached_input ?? price.input);
  const cost = (input + usage.completion_tokens * price.output) / 1e6;
  return `${price.currency}${cost.toLocaleString("en", { maximumSignificantDigits: 3, maximumFractionDigits: 20 })}`;
}

function Message({ message, price, isRunning, edit, retry }) {
  const { usage, figures } = message;
  const cached = usage?.prompt_tokens_details?.cached_tokens;
  return html`<article class="message ${message.role}" aria-label=${NAMES[message.role]}>
    <header><strong>${NAMES[message.role]}</strong>
      ${message.role === "user" && edit && html`<button type="button" class="quiet" onClick=${edit}>Edit</button>`}
      ${message.role === "assistant" && retry && html`<button type="button" class="quiet" onClick=${retry}>Retry</button>`}
    </header>
    ${message.reasoning && html`<details class="reasoning" open=${isRunning && !message.content}><summary>Reasoning</summary><${Markdown} text=${message.reasoning} /></details>`}
    ${message.pictures?.length > 0 && html`<${Pictures} pictures=${message.pictures} />`}
    ${message.role === "assistant" ? html`<${Markdown} text=${message.content ?? ""} />` : html`<div class="plain">${message.content}</div>`}
    ${isRunning && !message.content && !message.reasoning && html`<span class="waiting" aria-hidden="true"></span>`}
    ${message.tool_calls?.map((call) => html`<div class="call"><code>${call.function.name}</code><pre tabindex="0">${pretty(call.function.arguments)}</pre></div>`)}
    ${figures && html`<footer>
      ${usage && html`<span>${count(usage.prompt_tokens)} tokens in</span>`}
      ${cached > 0 && html`<span class="cached">${count(cached)} cached</span>`}
      ${usage && html`<span>${count(usage.completion_tokens)} out</span>`}
      ${figures.wait !== null && html`<span>first after ${duration(figures.wait)}</span>`}
      ${figures.rate !== null && html`<span class="rate">${figures.rate.toFixed(1)} tokens/s</span>`}
      ${usage && price && html`<span class="cost" title="at this gateway's prices">${costOf(usage, price)}</span>`}
      ${message.id && html`<a href="#explain/${encodeURIComponent(message.id)}">Explain</a>`}
      ${message.finish && message.finish !== "stop" && html`<span>${message.finish}</span>`}
    </footer>`}
  </article>`;
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

function ToolResults({ calls, give }) {
  const [results, setResults] = useState({});
  const send = (event) => {
    event.preventDefault();
    give(calls.map(({ id }) => ({ role: "tool", tool_call_id: id, content: results[id] ?? "" })));
  };
  return html`<form class="card" onSubmit=${send}><h2>Results of the tools</h2>
    ${calls.map(({ id, function: { name } }) => html`<label>${name}
      <textarea rows="2" value=${results[id] ?? ""} onInput=${(event) => setResults({ ...results, [id]: event.target.value })}></textarea></label>`)}
    <button type="submit">Send the results</button></form>`;
}

function Tools({ tools, change }) {
  const replace = (index, name) => (event) => change(tools.map((tool, i) => (i === index ? { ...tool, [name]: event.target.value } : tool)));
  return html`<div class="wide tools">
    ${tools.map((tool, index) => html`<fieldset key=${index}><legend>Tool ${index + 1}</legend>
      <label>Name<input value=${tool.name} onInput=${replace(index, "name")} /></label>
      <label class="wide">Description<input value=${tool.description} onInput=${replace(index, "description")} /></label>
      <label class="wide">Parameters' JSON schema<textarea rows="3" class="code" placeholder='{"type": "object", "properties": …}' value=${tool.parameters} onInput=${replace(index, "parameters")}></textarea></label>
      <button type="button" class="quiet" onClick=${() => change(tools.filter((_, i) => i !== index))}>Remove tool ${index + 1}</button></fieldset>`)}
    <button type="button" onClick=${() => change([...tools, { name: "", description: "", parameters: "" }])}>Add a tool</button>
  </div>`;
}

function Settings({ about, models, model, setModel, settings, setSettings }) {
  const field = (name) => ({ value: settings[name], onInput: (event) => setSettings({ ...settings, [name]: event.target.value }) });
  const chosen = models.find(({ name, adapters }) => name === model || adapters.includes(model));
  return html`<details class="settings">
    <summary><span>${model}</span><span class="muted">Settings</span></summary>
    <div class="fields">
      <label>Model<select value=${model} onChange=${(event) => setModel(event.target.value)}>
        ${models.flatMap(({ name, adapters }) => [name, ...adapters]).map((each) => html`<option value=${each}>${each}</option>`)}</select></label>
      <label>Temperature<input inputmode="decimal" ...${field("temperature")} /></label>
      <label>Top p<input inputmode="decimal" placeholder="1" ...${field("top_p")} /></label>
      <label>Most tokens<input inputmode="numeric" ...${field("max_tokens")} /></label>
      <label>Seed<input inputmode="numeric" placeholder="random" ...${field("seed")} /></label>
      <label>User<input placeholder=${about.subject} ...${field("user")} /></label>
      <label class="wide">System prompt<textarea rows="3" ...${field("system")}></textarea></label>
      <label class="wide">Answer's JSON schema<textarea rows="3" class="code" placeholder='{"type": "object", "properties": …}' ...${field("schema")}></textarea></label>
      ${chosen?.has_tools
        ? html`<${Tools} tools=${settings.tools} change=${(tools) => setSettings({ ...settings, tools })} />`
        : html`<p class="wide muted">This model's chat template has no tools.</p>`}
    </div>
  </details>`;
}
