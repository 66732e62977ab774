// 32 checks with the unmodified SDK of npm against the server of E2B_API_URL. Prints one line for
// each ("ok NAME" or "not ok NAME: WHY"), and ends with 1 where one failed.

import assert from "node:assert/strict";
import * as e2b from "e2b";

const { Sandbox, CommandExitError, FileNotFoundError, SandboxNotFoundError } = e2b;
const options = {
  apiUrl: process.env.E2B_API_URL,
  sandboxUrl: process.env.E2B_API_URL,
  apiKey: process.env.E2B_API_KEY,
  debug: false,
};
const metadata = { suite: `typescript-${process.pid}` };
const made = [];
let failed = 0;

async function create(more = {}) {
  const sandbox = await Sandbox.create("base", { timeoutMs: 120_000, ...more, ...options });
  made.push(sandbox);
  return sandbox;
}

async function check(name, run) {
  try {
    await run();
    console.log(`ok ${name}`);
  } catch (error) {
    failed += 1;
    console.log(`not ok ${name}: ${String(error?.stack ?? error).replaceAll("\n", " | ")}`);
  }
}

/** Wait until `get` returns something true, for 30 s at most. */
async function until(get) {
  const end = Date.now() + 30_000;
  for (;;) {
    const value = await get();
    if (value) return value;
    assert(Date.now() < end, "it did not happen in 30 s");
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
}

const box = await create({ metadata, envs: { FROM_CREATE: "yes" } });
const text = new TextDecoder();

await check("create gives an id", () => assert.match(box.sandboxId, /^[a-z0-9]+$/));
await check("it is running", async () => assert.equal(await box.isRunning(), true));
await check("info has the metadata", async () =>
  assert.deepEqual((await box.getInfo()).metadata.suite, metadata.suite));
await check("list filters by metadata", async () => {
  const found = await Sandbox.list({ ...options, query: { metadata } }).nextItems();
  assert.deepEqual(found.map((one) => one.sandboxId), [box.sandboxId]);
});

await check("run returns output and exit code", async () => {
  const result = await box.commands.run("echo out; echo err >&2");
  assert.deepEqual([result.stdout, result.stderr, result.exitCode], ["out\n", "err\n", 0]);
});
await check("an exit code is an error with the output", async () => {
  const error = await box.commands.run("echo before; exit 7").catch((caught) => caught);
  assert(error instanceof CommandExitError);
  assert.deepEqual([error.exitCode, error.stdout], [7, "before\n"]);
});
await check("output is streamed", async () => {
  const pieces = [];
  await box.commands.run("echo one; sleep 0.3; echo two", { onStdout: (piece) => pieces.push(piece) });
  assert.deepEqual(pieces, ["one\n", "two\n"]);
});
await check("environment of sandbox and command", async () => {
  const result = await box.commands.run('echo "$FROM_CREATE $OWN"', { envs: { OWN: "too" } });
  assert.equal(result.stdout, "yes too\n");
});
await check("working directory", async () =>
  assert.equal((await box.commands.run("pwd", { cwd: "/tmp" })).stdout, "/tmp\n"));
await check("user", async () =>
  assert.equal((await box.commands.run("id -u", { user: "root" })).stdout, "0\n"));
await check("text of other scripts", async () =>
  assert.equal((await box.commands.run("printf '%s' 'héllo 世界 🎈'")).stdout, "héllo 世界 🎈"));
await check("a deadline is an error", async () => {
  const error = await box.commands.run("sleep 60", { timeoutMs: 500 }).catch((caught) => caught);
  assert(error instanceof e2b.TimeoutError, String(error));
});
await check("stdin", async () => {
  const handle = await box.commands.run("head -n 1", { background: true, stdin: true });
  await box.commands.sendStdin(handle.pid, "typed\n");
  assert.equal((await handle.wait()).stdout, "typed\n");
});
await check("background commands are listed and killed", async () => {
  const handle = await box.commands.run("sleep 1000", { background: true });
  assert((await box.commands.list()).some((one) => one.pid === handle.pid));
  assert.equal(await box.commands.kill(handle.pid), true);
  await handle.wait().catch(() => {});
  assert(!(await box.commands.list()).some((one) => one.pid === handle.pid));
});
await check("a command is connected to again", async () => {
  const handle = await box.commands.run("read line; echo $line", { background: true, stdin: true });
  await handle.disconnect();
  const again = await box.commands.connect(handle.pid);
  await box.commands.sendStdin(handle.pid, "still here\n");
  assert.equal((await again.wait()).stdout, "still here\n");
});
await check("a terminal has its size, and takes another", async () => {
  let seen = "";
  const terminal = await box.pty.create({
    cols: 91,
    rows: 31,
    onData: (data) => (seen += text.decode(data, { stream: true })),
  });
  const type = (line) => box.pty.sendInput(terminal.pid, new TextEncoder().encode(line));
  await type("stty size\n");
  await until(() => seen.includes("31 91"));
  await box.pty.resize(terminal.pid, { cols: 40, rows: 20 });
  await type("stty size\n");
  await until(() => seen.includes("20 40"));
  assert.equal(await box.pty.kill(terminal.pid), true);
});

await check("a file is written and read", async () => {
  await box.files.write("folder/note.txt", "some text");
  assert.equal(await box.files.read("folder/note.txt"), "some text");
});
await check("bytes stay bytes", async () => {
  const data = Uint8Array.from({ length: 100_000 }, (_, place) => place % 256);
  await box.files.write("bytes", data.buffer);
  assert.deepEqual(await box.files.read("bytes", { format: "bytes" }), data);
});
await check("several files at once", async () => {
  await box.files.write([
    { path: "many/a", data: "A" },
    { path: "many/b", data: "B" },
  ]);
  assert.deepEqual((await box.files.list("many")).map((entry) => entry.name).sort(), ["a", "b"]);
});
await check("list goes as deep as asked", async () => {
  const found = await box.files.list("/home/user", { depth: 2 });
  assert(found.some((entry) => entry.path === "/home/user/folder/note.txt"));
});
await check("info of a file", async () => {
  const entry = await box.files.getInfo("folder/note.txt");
  assert.deepEqual([entry.name, entry.type, entry.size], ["note.txt", "file", 9]);
});
await check("rename, exists, remove", async () => {
  await box.files.rename("many/a", "many/c");
  assert.deepEqual([await box.files.exists("many/a"), await box.files.exists("many/c")], [false, true]);
  await box.files.remove("many");
  assert.equal(await box.files.exists("many"), false);
});
await check("a directory is made once", async () => {
  assert.deepEqual([await box.files.makeDir("made"), await box.files.makeDir("made")], [true, false]);
});
await check("a missing file is an error", async () => {
  const error = await box.files.read("nothing").catch((caught) => caught);
  assert(error instanceof FileNotFoundError);
});
await check("changes of a directory are seen", async () => {
  const events = [];
  const watch = await box.files.watchDir("made", (event) => events.push(event.name));
  await box.files.write("made/new", "");
  await until(() => events.includes("new"));
  await watch.stop();
});
await check("a signed URL serves the file", async () => {
  const url = await box.downloadUrl("folder/note.txt");
  const answer = await fetch(url, { headers: { "E2b-Sandbox-Id": box.sandboxId } });
  assert.deepEqual([answer.status, await answer.text()], [200, "some text"]);
});

await check("metrics", async () => assert((await box.getMetrics())[0].memTotal > 0));
await check("the end of a lease is set", async () => {
  const before = (await box.getInfo()).endAt.getTime();
  await box.setTimeout(600_000);
  assert((await box.getInfo()).endAt.getTime() > before + 400_000);
});
await check("pause and connect keep what runs", async () => {
  const handle = await box.commands.run("sleep 1000", { background: true });
  assert.equal(await Sandbox.pause(box.sandboxId, options), true);
  const again = await Sandbox.connect(box.sandboxId, { timeoutMs: 120_000, ...options });
  assert((await again.commands.list()).some((one) => one.pid === handle.pid));
  await again.commands.kill(handle.pid);
});
await check("a snapshot is a template", async () => {
  const { snapshotId } = await box.createSnapshot();
  const copy = await Sandbox.create(snapshotId, { timeoutMs: 60_000, ...options });
  assert.equal(await copy.files.read("folder/note.txt"), "some text");
  await copy.kill();
  assert.equal(await Sandbox.deleteSnapshot(snapshotId, options), true);
});
await check("forks go their own way", async () => {
  const [first, second] = await box.fork({ count: 2 });
  made.push(first, second);
  await first.files.write("folder/note.txt", "changed");
  assert.equal(await second.files.read("folder/note.txt"), "some text");
});
await check("kill ends it", async () => {
  assert.deepEqual([await box.kill(), await box.kill()], [true, false]);
  assert.equal(await box.isRunning(), false);
  const error = await Sandbox.getInfo(box.sandboxId, options).catch((caught) => caught);
  assert(error instanceof SandboxNotFoundError);
});

await Promise.allSettled(made.map((sandbox) => sandbox.kill()));
process.exit(failed ? 1 : 0);
