"use strict";
(() => {
  // The charts are made in the colours of the light page; here each one is put in the colours of the page as it is now.
  const root = document.documentElement;
  const given = JSON.parse(document.getElementById("charts").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const coarse = window.matchMedia("(pointer: coarse)");
  const narrow = window.matchMedia("(max-width: 40rem)");
  const config = { responsive: true, displayModeBar: false, displaylogo: false, doubleClick: "reset", showTips: false };

  const isDark = () => root.dataset.colours === "dark" || (root.dataset.colours !== "light" && dark.matches);

  const painted = (value) => {
    if (typeof value === "string") return Object.hasOwn(given.dark, value) ? given.dark[value] : value;
    if (Array.isArray(value)) return value.map(painted);
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([key, inner]) => [key, painted(inner)]));
  };

  const draw = (wantsDark) => {
    let failed = 0;
    for (const [name, chart] of Object.entries(given.charts)) {
      const place = document.getElementById(`chart-${name}`);
      const shown = wantsDark ? painted(chart) : structuredClone(chart);
      // A finger that scrolls the page must not zoom what it comes across.
      shown.layout.dragmode = coarse.matches ? false : "zoom";
      if (narrow.matches) {
        shown.layout.xaxis.nticks = Math.min(shown.layout.xaxis.nticks || 6, 4);
        shown.layout.xaxis.tickangle = 0;
        shown.layout.height += 18 * shown.data.filter((trace) => trace.showlegend !== false).length;
      }
      try {
        window.Plotly.react(place, shown.data, shown.layout, config);
      } catch (error) {
        failed += 1;
        place.textContent = `This chart could not be drawn (${error.message}); its numbers are in the table below.`;
        place.classList.add("failed");
      }
    }
    // What plotly measures texts with is outside of the window, but not of what a screen reader sees.
    document.getElementById("js-plotly-tester")?.setAttribute("aria-hidden", "true");
    root.dataset.drawn = wantsDark ? "dark" : "light";
    root.dataset.failed = String(failed);
  };

  for (const choice of document.querySelectorAll("input[name=colours]")) {
    choice.addEventListener("change", () => {
      root.dataset.colours = choice.value;
      draw(isDark());
    });
  }
  for (const query of [dark, narrow]) query.addEventListener("change", () => draw(isDark()));
  window.addEventListener("beforeprint", () => { root.dataset.printing = "yes"; draw(false); });
  window.addEventListener("afterprint", () => { delete root.dataset.printing; draw(isDark()); });
  document.getElementById("colours").hidden = false;
  draw(isDark());
})();
