#!/bin/bash
set -e
# step: read the file
cat etc/greenhouse.conf
# step: keep it as it was
cp etc/greenhouse.conf etc/greenhouse.conf.bak
# step: cooler nights
sed -i 's/^night_temp = .*/night_temp = 14/' etc/greenhouse.conf
# step: water later, and only there
sed -i '/^\[water\]/,/^\[alerts\]/s/^start = .*/start = 06:15/' etc/greenhouse.conf
# step: no debugging, but a pause
sed -i 's/^debug = .*/pause = sunday/' etc/greenhouse.conf
# step: mail on
sed -i 's/^mail = .*/mail = on/' etc/greenhouse.conf
# step: compare
diff etc/greenhouse.conf.bak etc/greenhouse.conf || true
