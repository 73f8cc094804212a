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
    const part = button.parentElement;
    part.classList.remove("markdown");
    part.textContent = (await getJSON(button.dataset.url)).text;
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

// What the page shows is followed: its address with the revision is asked, which is cheap, and the
// page itself when that has changed. Parts of it that are as they were stay, with what is open or
// focused in them. Not while the page is hidden. Scripts in what arrives never run.

const EVERY_MS = 2000;
const APART = 20; // times that the last look took: a large store is asked less often
const served = new WeakMap(); // an element, and its HTML as the server has sent it

function remember(part) {
  for (const child of part.children) served.set(child, child.outerHTML);
}

function merge(part, fresh) {
  const known = new Map([...part.children].map((child) => [child.id, child]));
  let before = null;
  let arrived = 0;
  for (const child of [...fresh.children]) {
    const html = child.outerHTML;
    let shown = known.get(child.id);
    known.delete(child.id);
    const busy = shown && shown.contains(document.activeElement) && shown !== document.activeElement;
    if (!shown || (served.get(shown) !== html && !busy)) {
      child.classList.toggle("arrived", !shown);
      if (!shown) arrived += 1;
      else shown.remove();
      shown = child;
      served.set(child, html);
    }
    if (before ? before.nextElementSibling !== shown : part.firstElementChild !== shown) {
      if (before) before.after(shown);
      else part.prepend(shown);
    }
    before = shown;
  }
  known.forEach((child) => child.remove());
  return arrived;
}

async function refresh() {
  const response = await fetch(location.href);
  if (!response.ok) throw new Error(response.statusText);
  const page = new DOMParser().parseFromString(await response.text(), "text/html");
  const bottom = document.documentElement;
  const atEnd = bottom.scrollHeight - scrollY - innerHeight < 80;
  let arrived = 0;
  for (const part of $$("[data-live]")) {
    const fresh = page.getElementById(part.id);
    if (fresh) arrived += merge(part, fresh);
  }
  if (arrived && atEnd && $("#conversation")) scrollTo(0, bottom.scrollHeight);
  look();
  return arrived;
}

const followed = $("[data-follow]");
if (followed) {
  $$("[data-live]").forEach(remember);
  const said = $("#followed");
  const follow = async () => {
    const began = performance.now();
    if (!document.hidden && $("#follow").checked) {
      try {
        const answer = await getJSON(followed.dataset.follow);
        const revision = answer.revision ?? answer;
        if (revision !== followed.dataset.revision) {
          const arrived = await refresh(); // of this revision, or a later one
          followed.dataset.revision = revision;
          if (arrived) said.textContent = `${arrived} new`;
        }
      } catch (error) {
        said.textContent = "no answer";
      }
    }
    setTimeout(follow, Math.max(EVERY_MS, APART * (performance.now() - began)));
  };
  setTimeout(follow, EVERY_MS);
}

// The status of sessions in a list, asked for when their rows come into sight, once for each save.

const statuses = new Map();
const inSight = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    if (!isIntersecting) continue;
    inSight.unobserve(target);
    const asked = `${target.dataset.status} ${target.dataset.asOf}`;
    if (!statuses.has(asked)) statuses.set(asked, getJSON(target.dataset.status));
    statuses.get(asked).then(
      ({ status }) => {
        const tag = document.createElement("span");
        tag.className = `tag ${status.name}`;
        tag.textContent = status.name;
        tag.title = status.detail;
        target.replaceChildren(tag);
      },
      () => statuses.delete(asked), // it was deleted, or cannot be read: its page says so
    );
  }
});
function look() {
  $$("[data-status]:empty").forEach((cell) => inSight.observe(cell));
}
look();

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
