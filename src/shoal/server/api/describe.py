"""Print the OpenAPI document of the API: `python -m shoal.server.api.describe > docs/openapi.json`."""

from __future__ import annotations

import json

from shoal.server.api.app import make_app


def main() -> None:
    print(json.dumps(make_app().openapi(), indent=1, sort_keys=True))


if __name__ == "__main__":
    main()
