"""An exchange of Flight with a hub, message by message, without the client of the channel."""

import json

import pyarrow.flight as fl
import pytest

from pipelinerl_core.data.schema import ROLLOUT_SCHEMA

TOKEN = "a-test-token"


def raw_exchange(url, schema=ROLLOUT_SCHEMA, token=TOKEN, role="actor"):
    client = fl.FlightClient(url, generic_options=[("grpc.use_local_subchannel_pool", 1)])
    options = fl.FlightCallOptions(headers=[(b"authorization", f"Bearer {token}".encode())])
    command = json.dumps({"role": role, "name": "raw"}).encode()
    writer, reader = client.do_exchange(fl.FlightDescriptor.for_command(command), options)
    writer.begin(schema)
    return client, writer, reader


def refusal(writer, reader, metadata, batch=None):
    if batch is None:
        writer.write_metadata(metadata)
    else:
        writer.write_with_metadata(batch, metadata)
    return json.loads(reader.read_chunk().app_metadata.to_pybytes())


def leave(client, writer, reader):
    writer.done_writing()
    with pytest.raises(StopIteration):
        reader.read_chunk()
    writer.close()
    client.close()
