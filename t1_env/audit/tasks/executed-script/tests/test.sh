#!/bin/bash
# Harbor's entry point: run the verifiers, then write the reward (1 if all of them pass, else 0).
mkdir -p /logs/verifier
if ! python3 -c 'import pytest' 2>/dev/null; then
  apt-get update && apt-get install -y --no-install-recommends python3-pytest
fi
if python3 -m pytest -p no:cacheprovider -rA "$(dirname "$0")/test_outputs.py"; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
