#!/usr/bin/env bash
# Sets up .venv as run_2x8.sh does, and what only tests need, then runs the tests. Arguments go to pytest:
#   bash run_tests.sh                      everything
#   bash run_tests.sh -m "not engine"      the fast ones, no engine
set -Eeuo pipefail
cd "$(dirname "$0")"
. tools/setup.sh
setup
setup_tests
(setup_vision)
exec "$PY" -m pytest "$@"
