"use strict";

const $ = (selector) => document.querySelector(selector);
const $$ = (selector) => [...document.querySelectorAll(selector)];

async function getJSON(url) {
  const response = await fetch(url + (url.includes("?") ? "&" : "?") + "format=json");
  const value = await response.json();
  if (!response.ok) throw new Error(value.message || response.statusText);
  return value;
}

// Light and dark

function switchTheme() {
  const root = document.documentElement;
  const dark = root.dataset.theme
    ? root.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  localStorage.setItem("perdure-theme", root.dataset.theme);
  document.dispatchEvent(new Event("theme"));
}
$("#theme").addEventListener("click", switchTheme);

// Large values, fetched when they are asked for. Always as text.

document.addEventListener("click", async (event) => {
  const button = event.target.closest("button.more");
  if (!button) return;
  button.disabled = true;
  try {
    button.parentElement.textContent = (await getJSON(button.dataset.url)).text;
  } catch (error) {
    button.textContent = String(error.message);
  }
});

// Completion of ids

const completed = $("[data-complete]");
if (completed) {
  let timer;
  completed.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(async () => {
      const url = completed.dataset.complete;
      const joint = url.includes("?") ? "&" : "?";
      const ids = await getJSON(url + joint + "prefix=" + encodeURIComponent(completed.value));
      $("#ids").replaceChildren(...ids.map((id) => new Option("", id)));
    }, 150);
  });
}

// Whether a session that is shown has new records. Not while the page is hidden.

const news = $("#news");
if (news) {
  setInterval(async () => {
    if (document.hidden) return;
    const more = (await getJSON(news.dataset.url)) - Number(news.dataset.seq);
    news.hidden = more <= 0;
    news.textContent = `${more} new records`;
  }, 3000);
}

// A page that did not wait for a long read is asked for again. Not while the page is hidden.

if ($("[data-again]")) {
  setInterval(() => document.hidden || location.reload(), 2000);
}

// Keyboard

function move(step) {
  const items = $$("[data-item]");
  if (!items.length) return;
  const at = items.findIndex((item) => item.contains(document.activeElement));
  const next = items[at < 0 ? 0 : Math.min(Math.max(at + step, 0), items.length - 1)];
  (next.matches("[tabindex]") ? next : next.querySelector("a, button, summary, input")).focus();
}

const SHORTCUTS = {
  "/": () => ($("input[type=search]") || $("input:not([type=hidden])"))?.focus(),
  j: () => move(1),
  k: () => move(-1),
  o: () => $("#older, a.older")?.click(),
  n: () => $("a.newer")?.click(),
  t: switchTheme,
  "?": () => $("#help").showModal(),
};
$("#keys").addEventListener("click", SHORTCUTS["?"]);

document.addEventListener("keydown", (event) => {
  const busy = event.target.closest("input, select, textarea, dialog");
  if (busy || event.ctrlKey || event.metaKey || event.altKey) return;
  const act = SHORTCUTS[event.key];
  if (act) {
    event.preventDefault();
    act();
  }
});
