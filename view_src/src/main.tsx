import { render } from "preact";
import "uplot/dist/uPlot.min.css";
import "./css/base.css";
import "./css/pieces.css";
import "./css/screens.css";
import "./css/tokens.css";
import "./css/overview.css";
import "./css/task.css";
import "./css/training.css";
import "./css/compare.css";
import { embeddedSource } from "./data/embedded";
import { serverSource, takeToken } from "./data/server";
import { Stores } from "./data/store";
import { pressed } from "./lib/keys";
import { applyTheme } from "./lib/theme";
import { App, Shell } from "./ui/app";

function start(root: HTMLElement): void {
  const metaElement = document.getElementById("meta");
  takeToken();
  const source = metaElement ? embeddedSource(metaElement) : serverSource();
  render(<App stores={new Stores(source)} />, root);
}

function main(): void {
  const root = document.getElementById("app");
  if (!root) return;
  applyTheme();
  // The shell is painted before any data is read: in a file of many megabytes the data comes after this script.
  render(<Shell />, root);
  document.addEventListener("keydown", pressed);
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", () => start(root));
  else start(root);
}

main();
