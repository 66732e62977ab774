// Checks of `@e2b/code-interpreter` of npm against the server of E2B_API_URL. Prints one line for
// each ("ok NAME" or "not ok NAME: WHY"), and ends with 1 where one failed.

import assert from "node:assert/strict";
import { Sandbox } from "@e2b/code-interpreter";

const options = {
  apiUrl: process.env.E2B_API_URL,
  sandboxUrl: process.env.E2B_API_URL,
  apiKey: process.env.E2B_API_KEY,
  debug: false,
};
let failed = 0;

async function check(name, run) {
  try {
    await run();
    console.log(`ok ${name}`);
  } catch (error) {
    failed += 1;
    console.log(`not ok ${name}: ${String(error?.stack ?? error).replaceAll("\n", " | ")}`);
  }
}

const box = await Sandbox.create({ timeoutMs: 120_000, ...options });

await check("names stay and the last value is the text", async () => {
  await box.runCode("x = 20");
  const execution = await box.runCode("x + 1");
  assert.equal(execution.text, "21");
  assert.equal(execution.executionCount, 2);
});
await check("output is streamed", async () => {
  const lines = [];
  const keep = (message) => lines.push([message.line, message.error]);
  const code = "import sys\nprint('one', flush=True)\nprint('two', file=sys.stderr, flush=True)";
  const execution = await box.runCode(code, { onStdout: keep, onStderr: keep });
  assert.deepEqual(lines.sort(), [["one\n", false], ["two\n", true]]);
  assert.deepEqual(execution.logs, { stdout: ["one\n"], stderr: ["two\n"] });
});
await check("results are rich", async () => {
  const code = `
class Table:
    def _repr_html_(self): return "<table>"
    def _repr_png_(self): return b"PNG"
    def _repr_json_(self): return {"rows": [1, float("nan")]}
display(Table())
Table()`;
  const { results } = await box.runCode(code);
  assert.deepEqual(results.map((result) => result.isMainResult), [false, true]);
  for (const result of results) {
    assert.equal(result.html, "<table>");
    assert.equal(atob(result.png), "PNG");
    assert.deepEqual(result.json, { rows: [1, null] });
  }
});
await check("errors have name, value and traceback", async () => {
  let seen;
  const { error } = await box.runCode("1 / 0", { onError: (given) => (seen = given) });
  assert.deepEqual([error.name, error.value], ["ZeroDivisionError", "division by zero"]);
  assert.match(error.traceback, /^Traceback/);
  assert.equal(seen.name, error.name);
});
await check("environment variables are for one run", async () => {
  const code = "import os; os.environ.get('ONE_RUN')";
  assert.equal((await box.runCode(code, { envs: { ONE_RUN: "yes" } })).text, "yes");
  assert.equal((await box.runCode(code)).text, undefined);
});
await check("contexts are apart", async () => {
  const context = await box.createCodeContext({ cwd: "/tmp" });
  assert.equal((await box.runCode("x = 5; import os; os.getcwd()", { context })).text, "/tmp");
  assert((await box.listCodeContexts()).some((one) => one.id === context.id));
  await box.restartCodeContext(context);
  assert.equal((await box.runCode("x", { context })).error.name, "NameError");
  await box.removeCodeContext(context);
  await assert.rejects(box.runCode("x", { context }), /not found/);
  assert.equal((await box.runCode("x")).text, "20");
});
await check("a run past its time is interrupted", async () => {
  await assert.rejects(box.runCode("while True: pass", { timeoutMs: 1000 }), /timed out/i);
  assert.equal((await box.runCode("x")).text, "20");
});
await check("other languages are refused", async () => {
  await assert.rejects(box.runCode("1", { language: "r" }), /400/);
});

await box.kill();
process.exit(failed ? 1 : 0);
