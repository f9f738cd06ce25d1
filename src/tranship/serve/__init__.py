"""The OpenAI-compatible endpoint over a rollout engine. Knows engines by their protocol, and no stage of a run."""

from tranship.serve.app import Endpoint
from tranship.serve.desk import Desk
from tranship.serve.load import EngineSettings, Loaded, Served, load_served
from tranship.serve.server import Address, HttpServer, listen, read_token, serve, url_of
from tranship.serve.shared import SharedEngine

__all__ = [
    "Address",
    "Desk",
    "Endpoint",
    "EngineSettings",
    "HttpServer",
    "Loaded",
    "Served",
    "SharedEngine",
    "listen",
    "load_served",
    "read_token",
    "serve",
    "url_of",
]
