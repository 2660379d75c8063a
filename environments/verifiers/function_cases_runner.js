// Runs inside the grading box: calls a candidate's JavaScript function on given inputs and writes what came back. Shipped as data.
//
// Descriptor 4 carries one JSON line {nonce, path, function} and one JSON line of encoded arguments a case, read to the end before
// the candidate is loaded. Results leave over descriptor 3, tagged with the nonce; the candidate's descriptors 0, 1 and 2 are
// /dev/null. As in function_cases_runner.py, candidate code could forge a value, which is what it returns anyway: no expected value
// is in this box.
//
// The function is looked for in module.exports, then among the names that the file declares (ES modules: paths ending in .mjs, by
// export). Promises are awaited. Values: null ["NoneType"], boolean ["bool"], string ["str"], number ["float", hex], bigint ["int"],
// Array and typed arrays ["list"], Set ["set"], plain objects and Map ["dict"]; all else is ["other", its class].
"use strict";
const fs = require("node:fs");
const vm = require("node:vm");
const path = require("node:path");
const url = require("node:url");
const { createRequire } = require("node:module");

const MAX_LINE = 64 * 1024;
const MAX_DEPTH = 50;
const stringify = JSON.stringify, keys = Object.keys, isArray = Array.isArray, write = fs.writeSync;
const prototypeOf = Object.getPrototypeOf, plain = [Object.prototype, null];
const view = new DataView(new ArrayBuffer(8));

function hex(number) {
  // As Python's float.hex, which is exact.
  if (Number.isNaN(number)) return "nan";
  if (!Number.isFinite(number)) return number > 0 ? "inf" : "-inf";
  view.setFloat64(0, number);
  const bits = view.getBigUint64(0);
  const sign = bits >> 63n ? "-" : "";
  const exponent = Number((bits >> 52n) & 0x7ffn);
  const mantissa = (bits & 0xfffffffffffffn).toString(16).padStart(13, "0");
  return exponent ? `${sign}0x1.${mantissa}p${exponent - 1023}` : `${sign}0x0.${mantissa}p-1022`;
}

function encode(value, depth = 0) {
  if (depth > MAX_DEPTH) return ["other", "nested too deeply"];
  const more = (item) => encode(item, depth + 1);
  switch (typeof value) {
    case "boolean": return ["bool", value];
    case "string": return ["str", value];
    case "number": return ["float", hex(value)];
    case "bigint": return ["int", value.toString().slice(0, 3000)];
    case "object": break;
    default: return ["other", typeof value];
  }
  if (value === null) return ["NoneType", null];
  if (isArray(value)) return ["list", Array.from(value, more)];
  if (ArrayBuffer.isView(value) && !(value instanceof DataView)) return ["list", Array.from(value, more)];
  if (value instanceof Set) return ["set", Array.from(value, more)];
  if (value instanceof Map) return ["dict", Array.from(value, ([key, item]) => [more(key), more(item)])];
  if (plain.includes(prototypeOf(value))) return ["dict", keys(value).map((key) => [more(key), more(value[key])])];
  return ["other", String(value.constructor && value.constructor.name).slice(0, 100)];
}

function decode([kind, content]) {
  switch (kind) {
    case "NoneType": return null;
    case "int": {
      const number = Number(content);
      return Number.isSafeInteger(number) ? number : BigInt(content);
    }
    case "float": return unhex(content);
    case "list": case "tuple": return content.map(decode);
    case "set": case "frozenset": return new Set(content.map(decode));
    case "dict":
      if (content.every(([key]) => key[0] === "str")) {
        const made = {};
        for (const [key, item] of content) Object.defineProperty(made, key[1], { value: decode(item), writable: true, enumerable: true, configurable: true });
        return made;
      }
      return new Map(content.map(([key, item]) => [decode(key), decode(item)]));
    default: return content;
  }
}

function unhex(text) {
  const found = /^(-?)0x([01])\.?([0-9a-f]*)p([-+]?[0-9]+)$/.exec(text);
  if (!found) return { nan: NaN, inf: Infinity, "-inf": -Infinity }[text];
  const digits = found[3].padEnd(13, "0");
  let number = Number(found[2] === "1" ? 0x10000000000000n + BigInt("0x" + digits) : BigInt("0x" + digits));
  for (let left = Number(found[4]) - 52; left !== 0; ) {
    const step = Math.max(-1000, Math.min(1000, left));
    number *= 2 ** step;
    left -= step;
  }
  return found[1] ? -number : number;
}

function describe(error) {
  try {
    const text = error instanceof Error ? `${error.name}: ${error.message}` : `threw ${String(error)}`;
    return text.slice(0, 200).replace(/[^\x20-\x7e]/g, "?");
  } catch {
    return "an exception that cannot be shown";
  }
}

function sender(tag) {
  return (id, outcome, content) => {
    let line = stringify([tag, id, outcome, content]);
    if (line === undefined || line.length > MAX_LINE) line = stringify([tag, id, "other", "the result is too large"]);
    let data = Buffer.from(line + "\n");
    while (data.length) {
      try {
        data = data.subarray(write(3, data));
      } catch (error) {
        if (error.code !== "EAGAIN") throw error;
      }
    }
  };
}

async function load(file, name) {
  const where = path.resolve(file);
  if (file.endsWith(".mjs")) {
    const found = await import(url.pathToFileURL(where).href);
    return found[name] ?? found.default;
  }
  const module = { exports: {} };
  const source = fs.readFileSync(where, "utf8").replace(/^#!.*/, "");
  const body = `${source}\n;return typeof ${name} === "undefined" ? undefined : ${name};`;
  const wrapped = vm.compileFunction(body, ["exports", "require", "module", "__filename", "__dirname"], { filename: file });
  const declared = wrapped.call(module.exports, module.exports, createRequire(where), module, where, path.dirname(where));
  return module.exports?.[name] ?? declared ?? module.exports;
}

async function main() {
  const [first, ...rest] = fs.readFileSync(4, "utf8").split("\n").filter(Boolean);
  const job = JSON.parse(first), cases = rest.map((line) => JSON.parse(line));
  const send = sender(job.nonce);
  let called;
  try {
    called = await load(job.path, job.function);
    if (typeof called !== "function") throw new ReferenceError(`${job.function} is not a function of the file`);
  } catch (error) {
    return send("import", "raised", describe(error));
  }
  for (const { id, arguments: encoded } of cases) {
    let outcome = "returned", content;
    try {
      content = encode(await called(...encoded.map(decode)));
    } catch (error) {
      [outcome, content] = ["raised", describe(error)];
    }
    send(id, outcome, content);
  }
}

process.on("uncaughtException", () => process.exit(1));
process.on("unhandledRejection", () => {});
main().then(() => process.exit(0), () => process.exit(1));
