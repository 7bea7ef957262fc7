"""`pipelinerl status --web`: serve the page of a run until somebody stops it."""

from flows.console import say
from pipelinerl_core.config import build_config
from pipelinerl_core.config.model_path import resolve_model_path
from pipelinerl_core.storage.object_store import open_store
from pipelinerl_core.tracking.follow import RunFollower
from pipelinerl_core.tracking.samples import token_decoder
from pipelinerl_core.tracking.web import LivePage, build_server


def serve(url: str, host: str, port: int) -> None:
    """Blocks until Ctrl-C; ConfigError when the address cannot be had."""
    store = open_store(url)
    model = resolve_model_path(build_config(RunFollower(store).run.config).model.path)
    server = build_server(LivePage(store, token_decoder(str(model)) if model else None), host, port)
    say(f"http://{host}:{server.server_address[1]}/ follows {url} until Ctrl-C")
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        say("the page is closed; the run goes on")
    finally:
        server.server_close()
