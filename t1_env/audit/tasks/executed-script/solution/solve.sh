#!/bin/bash
set -e
# step: write the script
cat > roman.sh <<'EOF'
n=$1
out=
for pair in 1000:M 900:CM 500:D 400:CD 100:C 90:XC 50:L 40:XL 10:X 9:IX 5:V 4:IV 1:I; do
  while [ "$n" -ge "${pair%:*}" ]; do out=$out${pair#*:}; n=$((n - ${pair%:*})); done
done
echo "$out"
EOF
