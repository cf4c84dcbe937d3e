#!/bin/sh
# labels.sh FILE: print a label for every line of FILE
for line in $(cat $1); do
  name=${line%;*}
  shelf=${line#*;}
  echo "$shelf $name"
done
exit 0
