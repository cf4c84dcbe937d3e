#!/bin/bash
set -e
# step: read the script
cat bin/labels.sh
# step: see what it does now
bash bin/labels.sh lists/spring.txt
# step: write it anew
cat > bin/labels.sh <<'SCRIPT'
#!/bin/bash
# labels.sh FILE: print a label for every line of FILE
if [ ! -f "$1" ]; then
  echo "labels.sh: no such list: $1" >&2
  exit 2
fi
while IFS= read -r line || [ -n "$line" ]; do
  case $line in '' | '#'*) continue ;; esac
  echo "${line#*;}: ${line%;*}"
done < "$1"
SCRIPT
# step: let everyone run it
chmod 755 bin/labels.sh
# step: try a list that does not exist
bin/labels.sh lists/none.txt || echo "status $?"
# step: print the spring labels
mkdir -p out && bin/labels.sh lists/spring.txt > out/spring.txt
