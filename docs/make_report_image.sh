#!/usr/bin/env bash
# Draw docs/images/report.png, the report of `make demo`, with Chromium (Debian: apt-get install chromium).
#   make demo && bash docs/make_report_image.sh [REPORT.html]
set -euo pipefail
cd "$(dirname "$0")/.."
report=$(realpath "${1:-demo/report.html}")
image=docs/images/report.png
profile=$(mktemp -d)
trap 'rm -rf "$profile"' EXIT
# preferredColorScheme 1 is light. The height shows the verdict, the tiles and the first charts.
chromium --headless=new --no-sandbox --disable-gpu --hide-scrollbars --blink-settings=preferredColorScheme=1 \
  --user-data-dir="$profile" --window-size="1280,${HEIGHT:-1180}" --virtual-time-budget=5000 \
  --screenshot="$PWD/$image" "file://$report" 2>/dev/null
# A palette makes the file three times smaller. Pillow is installed with the extra `plots`.
"${VENV:-.venv}/bin/python" -c "
from PIL import Image
image = Image.open('$image').convert('RGB')
image.quantize(64, dither=Image.Dither.NONE).save('$image', optimize=True)"
ls -l "$image"
