"use strict";

// The charts of the live page. Nothing is asked for while the page is not visible.

const EVERY = 1000;
const SHOWN = 300;

const bytes = (n) => {
  for (const unit of ["B", "KiB", "MiB"]) {
    if (n < 1024) return `${n.toFixed(unit === "B" ? 0 : 1)} ${unit}`;
    n /= 1024;
  }
  return `${n.toFixed(1)} GiB`;
};
const seconds = (n) =>
  n === 0 ? "0 s" : (n < 1 ? `${(1000 * n).toFixed(n < 0.01 ? 1 : 0)} ms` : `${n.toFixed(1)} s`);
const clock = (at) => new Date(1000 * at).toLocaleTimeString("en-GB");
const plain = (n) => (n < 10 && n % 1 ? n.toFixed(1) : Math.round(n).toLocaleString("en"));
const UNITS = { unsaved_bytes: bytes, unsaved_age: seconds, loop_lag: seconds, slowest: seconds };

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const samples = [];
let charts = [];

function draw(section) {
  const name = section.dataset.series;
  const unit = UNITS[name] || plain;
  const box = section.querySelector("div");
  const axis = { stroke: color("--dim"), grid: { stroke: color("--line"), width: 1 }, ticks: { show: false } };
  const options = {
    width: box.clientWidth,
    height: 150,
    legend: { show: false },
    cursor: { show: false },
    scales: { y: { range: (_, low, high) => [0, high > 0 ? high * 1.15 : 1] } },
    axes: [{ ...axis, size: 32, space: 90, values: (_, ticks) => ticks.map(clock) }, { ...axis, size: 66, values: (_, ticks) => ticks.map(unit) }],
    series: [{}, { stroke: color("--accent"), width: 1.5, fill: color("--accent-soft"), points: { show: false } }],
  };
  const plot = new uPlot(options, [[], []], box);
  const output = section.querySelector("output");
  return () => {
    plot.setData([samples.map((s) => s.at), samples.map((s) => s[name])]);
    if (samples.length) output.textContent = unit(samples[samples.length - 1][name]);
  };
}

function drawAll() {
  for (const box of $$(".chart > div")) box.replaceChildren();
  charts = $$(".chart").map(draw);
  charts.forEach((update) => update());
}

function cell(text) {
  const element = document.createElement("td");
  element.textContent = text;
  return element;
}

function show(page) {
  samples.push(...page.samples);
  samples.splice(0, Math.max(samples.length - SHOWN, 0));
  charts.forEach((update) => update());
  const status = $("#status");
  status.textContent = page.status;
  status.className = `status ${page.status}`;
  const reasons = $("#reasons");
  reasons.hidden = !page.reasons.length;
  reasons.replaceChildren(
    ...page.reasons.map((reason) => {
      const item = document.createElement("li");
      item.textContent = reason;
      return item;
    }),
  );
  $("#events").replaceChildren(
    ...page.events.map((event) => {
      const row = document.createElement("tr");
      row.append(cell(new Date(1000 * event.at).toISOString().slice(11, 19)), cell(event.name), cell(event.text));
      return row;
    }),
  );
  $("#alone").hidden = samples.some((sample) => sample.sessions);
}

async function poll() {
  if (!document.hidden) {
    const after = samples.length ? samples[samples.length - 1].at : 0;
    try {
      show(await getJSON(`${$("#charts").dataset.url}?after=${after}`));
    } catch (error) {
      $("#status").textContent = "no answer";
      $("#status").className = "status failing";
    }
  }
  setTimeout(poll, EVERY);
}

drawAll();
poll();
document.addEventListener("theme", drawAll);
let resized;
addEventListener("resize", () => {
  clearTimeout(resized);
  resized = setTimeout(drawAll, 150);
});
