#!/bin/bash
set -e
# step: see what the lines look like
head -n 4 logs/*.log
# step: make the report directory
mkdir -p report
# step: collect the alarms, evening before morning
awk '$2 == "ALARM" { print ($1 < "12" ? 1 : 0), $0 }' logs/*.log | sort | cut -d ' ' -f 2- > report/alarms.txt
# step: count by machine
for machine in fan pump valve; do
  echo "$machine $(awk '$2 == "ALARM"' "logs/$machine.log" | wc -l)"
done > report/counts.txt
# step: read both
cat report/alarms.txt report/counts.txt
# step: name the machine with the first alarm
head -n 1 report/alarms.txt | cut -d ' ' -f 3 > report/first.txt
# step: compress the log with the most alarms
gzip -c logs/pump.log > report/pump.log.gz
