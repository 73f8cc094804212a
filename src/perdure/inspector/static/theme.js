"use strict";
// Before the page is painted, so that it does not flash in the other theme.
const chosen = localStorage.getItem("perdure-theme");
if (chosen) document.documentElement.dataset.theme = chosen;
