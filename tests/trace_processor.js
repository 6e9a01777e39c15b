// SPDX-License-Identifier: Apache-2.0
// Perfetto's trace processor, the WebAssembly that its page runs, between standard input and standard output: the bytes
// of its RPC protocol, requests in and answers out, unchanged. Argument: the folder that has engine_bundle.js.
'use strict';

const fs = require('node:fs');
const path = require('node:path');
const vm = require('node:vm');

const folder = process.argv[2];

class FromFolder {
  open(method, name) {
    this.name = path.basename(name);
  }
  send() {
    this.response = fs.readFileSync(path.join(folder, this.name));
  }
}

// A worker of a browser, as far as the bundle looks.
const self = {location: {href: folder + '/'}};
const context = vm.createContext({
  self,
  WorkerGlobalScope: function() {},
  XMLHttpRequest: FromFolder,
  console: {log: console.error, warn: console.error, error: console.error},
  TextDecoder,
  URL,
  setTimeout,
  performance,
  crypto,
});
vm.runInContext(fs.readFileSync(path.join(folder, 'engine_bundle.js'), 'utf8'), context);
const Bytes = vm.runInContext('Uint8Array', context);

const port = {postMessage: (bytes) => process.stdout.write(bytes)};
self.onmessage({data: port});
// What the bundle does when the WebAssembly runs comes before the first byte.
setTimeout(() => process.stdin.on('data', (chunk) => port.onmessage({data: new Bytes(chunk)})), 0);
