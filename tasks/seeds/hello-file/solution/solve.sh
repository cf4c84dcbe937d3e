#!/bin/bash
set -e
# step: write the line
echo hi > hello.txt
