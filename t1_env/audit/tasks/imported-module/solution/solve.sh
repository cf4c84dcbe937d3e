#!/bin/bash
set -e
# step: write the module
cat > wordcount.py <<'EOF'
from collections import Counter


def count(text):
    return dict(Counter(text.split()))


def top(text, n):
    return [word for word, _ in Counter(text.split()).most_common(n)]


def longest(text):
    return max(text.split(), key=len)
EOF
# step: write the version
echo 1.0 > VERSION
