#!/bin/bash
set -e
# step: test the archives
for archive in backup/*.tar.gz; do gzip -t "$archive" && echo "$archive is intact"; done
# step: list the newest intact one
tar -tzf backup/tuesday.tar.gz
# step: restore it
mkdir recipes && tar -xzf backup/tuesday.tar.gz -C recipes
# step: delete scratch files
find recipes -name '*.tmp' -delete
# step: name the damaged archive
echo wednesday.tar.gz > backup/damaged.txt
# step: delete it
rm backup/wednesday.tar.gz
# step: pack the clean recipes
tar -C recipes -cf backup/clean.tar .
