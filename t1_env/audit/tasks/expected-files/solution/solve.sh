#!/bin/bash
set -e
# step: make the directory
mkdir out
# step: sort
sort words.txt > out/sorted.txt
# step: count
wc -l < words.txt > out/number.txt
# step: find the longest
awk 'length > length(longest) { longest = $0 } END { print longest }' words.txt > out/longest.txt
# step: reverse
tac words.txt > out/reversed.txt
