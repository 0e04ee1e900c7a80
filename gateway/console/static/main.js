// The shell: navigation, theme, and the page that the address names after its #.

import { html, render, useEffect, useState } from "./vendor/htm-preact.js";
import { Failure, SignIn } from "./parts.js";
import { credential, getJson } from "./server.js";
import { THEMES, theme } from "./theme.js";
import { Chat } from "./pages/chat.js";
import { Explain } from "./pages/explain.js";
import { Fleet } from "./pages/fleet.js";
import { Grove } from "./pages/grove.js";

const PAGES = [
  { name: "chat", title: "Chat", page: Chat, icon: "M4 5h16v11H9l-5 4z" },
  { name: "grove", title: "Grove", page: Grove, icon: "M12 21V11M12 15l-5-4M12 13l5-5M7 11V6M17 8V4M12 11V4" },
  { name: "explain", title: "Explain", page: Explain, icon: "M4 6h7M8 12h9M14 18h6" },
  { name: "fleet", title: "Fleet", page: Fleet, icon: "M4 5h16v5H4zM4 14h16v5H4zM8 7.5h.01M8 16.5h.01" },
];

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

const address = () => {
  const [, name, argument] = /^#([^/]*)\/?(.*)$/s.exec(location.hash) ?? ["", "", ""];
  return { page: PAGES.find((page) => page.name === name) ?? PAGES[0], argument: decoded(argument) };
};

function Console() {
  const [at, setAt] = useState(address);
  const [about, setAbout] = useState(null);
  const [error, setError] = useState(null);
  const [chosen, setChosen] = useState(theme.get());
  const load = () => {
    setError(null);
    getJson("/console/about").then(setAbout, setError);
  };
  useEffect(load, []);
  useEffect(() => {
    const moved = () => setAt(address());
    addEventListener("hashchange", moved);
    return () => removeEventListener("hashchange", moved);
  }, []);
  useEffect(() => {
    document.title = `${at.page.title} · Pando`;
  }, [at.page]);
  const nextTheme = () => {
    const next = THEMES[(THEMES.indexOf(chosen) + 1) % THEMES.length];
    theme.set(next);
    setChosen(next);
  };
  const signOut = () => {
    credential.set("");
    location.reload();
  };
  const { page: Page } = at.page;
  return html`
    <a class="skip" href="#content" onClick=${(event) => (event.preventDefault(), document.getElementById("content").focus())}>Skip to content</a>
    <header class="side">
      <div class="brand"><img src="/console/static/icon.svg" alt="" width="28" height="28" /><span>Pando</span></div>
      <nav aria-label="Pages">
        ${PAGES.map(
          ({ name, title, icon }) => html`<a href="#${name}" aria-current=${name === at.page.name ? "page" : null}>
            <svg viewBox="0 0 24 24" aria-hidden="true"><path d=${icon} /></svg><span>${title}</span></a>`,
        )}
      </nav>
      <div class="who">
        ${about && html`<span class="identity" title="${about.tenant}/${about.subject}">${about.tenant}/${about.subject}${about.is_admin ? " · admin" : ""}</span>`}
        <button type="button" class="quiet" onClick=${nextTheme} aria-label="Theme: ${chosen}. Change it.">Theme: ${chosen}</button>
        ${credential.get() && html`<button type="button" class="quiet" onClick=${signOut}>Forget the key</button>`}
      </div>
    </header>
    <main id="content" tabindex="-1">
      ${error
        ? html`<h1>${at.page.title}</h1>${error.status === 401
            ? html`<section class="card narrow"><h2>Sign in</h2><p>${error.message}</p><${SignIn} done=${load} /></section>`
            : html`<${Failure} error=${error} retry=${load} />`}`
        : about && html`<${Page} about=${about} argument=${at.argument} />`}
    </main>`;
}

theme.set(theme.get());
render(html`<${Console} />`, document.getElementById("console"));
