#!/bin/bash
set -e
# step: look at the data
cat data/harvest.csv
# step: set malformed rows aside
mkdir -p out && awk -F, 'NR > 1 && !(NF == 4 && $4 ~ /^[0-9]+$/)' data/harvest.csv > out/rejects.csv
# step: keep the good rows for what follows
awk -F, 'NR > 1 && NF == 4 && $4 ~ /^[0-9]+$/' data/harvest.csv > /tmp/good.csv
# step: add up by crop
awk -F, '{ kg[$3] += $4 } END { for (crop in kg) print crop "," kg[crop] }' /tmp/good.csv | sort -t, -k2,2nr > /tmp/totals
# step: put the header on top
{ echo crop,kg; cat /tmp/totals; } > out/totals.csv
# step: find the best field
awk -F, '{ kg[$2] += $4 } END { for (field in kg) print kg[field], field }' /tmp/good.csv | sort -nr | head -n 1 | cut -d ' ' -f 2 > out/field.txt
# step: count the good rows
wc -l < /tmp/good.csv > out/rows.txt
