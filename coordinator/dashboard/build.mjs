// Builds what the coordinator's wheel holds, from `src` and the packages of package-lock.json: `make assets`.
// `build.json` names every built file, and has a digest of what they were built of, which a test compares.
import { createHash } from "node:crypto";
import { mkdirSync, readFileSync, readdirSync, rmSync, statSync, writeFileSync } from "node:fs";
import { join, relative } from "node:path";
import { build } from "esbuild";

const root = import.meta.dirname;
const out = join(root, "../shoal/coordinator/api/dashboard/static");
const vendored = ["preact", "uplot"];

rmSync(out, { recursive: true, force: true });
mkdirSync(out, { recursive: true });
const result = await build({
  absWorkingDir: root,
  entryPoints: ["src/main.jsx", "src/style.css"],
  bundle: true, minify: true, format: "esm", target: "es2022",
  jsx: "automatic", jsxImportSource: "preact",
  entryNames: "[name]-[hash]", outdir: out, metafile: true, legalComments: "none", charset: "utf8",
});
const built = Object.keys(result.metafile.outputs).map((path) => path.split("/").pop());
const named = (prefix, end) => built.find((name) => name.startsWith(prefix) && name.endsWith(end));

const icon = readFileSync(join(root, "src/icon.svg"));
const iconName = `icon-${createHash("sha256").update(icon).digest("hex").slice(0, 8)}.svg`;
writeFileSync(join(out, iconName), icon);
const page = readFileSync(join(root, "src/index.html"), "utf8")
  .replace("{main}", named("main", ".js")).replace("{style}", named("style", ".css")).replace("{icon}", iconName);
writeFileSync(join(out, "index.html"), page);

const licences = vendored.map((name) => {
  const folder = join(root, "node_modules", name);
  const { version, license } = JSON.parse(readFileSync(join(folder, "package.json"), "utf8"));
  return `${name} ${version} (${license})\n\n${readFileSync(join(folder, "LICENSE"), "utf8").trim()}\n`;
});
writeFileSync(join(out, "licences.txt"), licences.join("\n----\n\n"));

const walk = (folder) => readdirSync(folder).sort().flatMap((name) => {
  const path = join(folder, name);
  return statSync(path).isDirectory() ? walk(path) : [path];
});
const sources = [...walk(join(root, "src")), ...["build.mjs", "package.json", "package-lock.json"].map((n) => join(root, n))];
const digest = createHash("sha256");
for (const path of sources) digest.update(`${relative(root, path)}\0`).update(readFileSync(path)).update("\0");
const files = readdirSync(out).sort();
const sums = Object.fromEntries(files.map((name) => [name, createHash("sha256").update(readFileSync(join(out, name))).digest("hex")]));
writeFileSync(join(out, "build.json"), `${JSON.stringify({ sources: digest.digest("hex"), files: sums }, null, 1)}\n`);
for (const name of files) console.log(name, statSync(join(out, name)).size);
