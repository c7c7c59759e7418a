"""Writes the OpenAPI document of the controller's API: `python tests/unit/controller/openapi.py FILE`."""

import json
import sys
from pathlib import Path

from areal_async.base.yaml_file import dump_yaml
from areal_async.cluster.operations import openapi_document


def text() -> str:
    """The document as YAML."""
    # Through JSON: what occurs twice is written twice.
    return dump_yaml(json.loads(json.dumps(openapi_document())))


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(text(), encoding="utf-8")
