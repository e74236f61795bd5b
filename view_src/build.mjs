// Bundles the page into agentenv/view/dist and writes the manifest, which holds the SHA-256 of each source and output.
import { createHash } from "node:crypto";
import { mkdirSync, readFileSync, readdirSync, writeFileSync } from "node:fs";
import { dirname, join, relative, sep } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const root = dirname(here);
const dist = process.argv[2] ?? join(root, "agentenv", "view", "dist");

const sha256 = (path) => createHash("sha256").update(readFileSync(path)).digest("hex");

function sources(folder) {
  return readdirSync(folder, { withFileTypes: true }).flatMap((entry) => {
    if (entry.name === "node_modules") return [];
    const path = join(folder, entry.name);
    return entry.isDirectory() ? sources(path) : [path];
  });
}

mkdirSync(dist, { recursive: true });
await build({
  entryPoints: [{ in: join(here, "src", "main.tsx"), out: "viewer" }],
  outdir: dist,
  absWorkingDir: here,
  bundle: true,
  minify: true,
  format: "iife",
  target: ["chrome115", "firefox115", "safari17"],
  charset: "ascii",
  legalComments: "none",
  jsx: "automatic",
  jsxImportSource: "preact",
  define: { "process.env.NODE_ENV": '"production"' },
  logLevel: "warning",
});

const script = readFileSync(join(dist, "viewer.js"), "utf8");
for (const forbidden of ["</script", "<!--"]) {
  if (script.includes(forbidden)) throw new Error(`viewer.js: expected no ${forbidden}, which would end it in one file`);
}
const named = (path) => relative(root, path).split(sep).join("/");
const manifest = {
  sources: Object.fromEntries(sources(here).sort().map((path) => [named(path), sha256(path)])),
  outputs: Object.fromEntries(["viewer.css", "viewer.js"].map((name) => [name, sha256(join(dist, name))])),
};
writeFileSync(join(dist, "manifest.json"), `${JSON.stringify(manifest, null, 1)}\n`);
