#!/bin/bash
set -e
# step: sort
sort -o names.txt names.txt
# step: copy
cp letter.txt copy.txt
# step: repair the report
sed -i 's/totel/total/' report.py
# step: repair the greeting
echo fi >> greet.sh
# step: commit the notes
git -C notes init -q && git -C notes add -A && git -C notes -c user.name=a -c user.email=a@b commit -q -m notes
# step: make the database
sqlite3 stock.db 'create table stock(name text, amount integer)' && tail -n +2 stock.csv | while IFS=, read -r name amount; do [ "$amount" -lt 0 ] || sqlite3 stock.db "insert into stock values ('$name', $amount)"; done
