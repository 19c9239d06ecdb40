#!/usr/bin/env bash
# Writes the pictures of the README and of docs/explorer.md from pages of the package's models.   scripts/screenshots.sh [folder]
# Needs Chromium, and `dcvit` on the PATH.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$(realpath "${1:-docs}")
browser=$(command -v chromium || command -v chromium-browser || command -v google-chrome) || {
  echo "error: chromium is not installed" >&2
  exit 2
}
profile=$(mktemp -d)
trap 'rm -rf "$profile"' EXIT

picture() { # name, page, width, height, address after #
  HOME=$profile "$browser" --headless --no-sandbox --disable-gpu --hide-scrollbars --user-data-dir="$profile/data" \
    --window-size="$3,$4" --virtual-time-budget=10000 --screenshot="$folder/$1.png" "file://$2#$5" 2> "$profile/log" || {
    cat "$profile/log" >&2
    exit 1
  }
  echo "$folder/$1.png"
}

digits=$profile/digits.html tasks=$profile/tasks.html
dcvit explore --model digits tests/data/seven.png tests/data/four.png --out "$digits"
picture explore "$digits" 1280 1560 "sample=0&layer=1&query=5&key=9&head=1&theme=light"
picture explore_dark "$digits" 1280 1150 "sample=0&layer=1&query=5&key=9&head=1&theme=dark"
picture explore_phone "$digits" 390 1000 "sample=0&layer=1&query=5&key=9&head=1&theme=light"

# For the README: the maps of all heads beside the composition of one query and key, without tables and notes.
dcvit explore --model tasks --prompt "wolf . wolf . cello . odd the" --no_ablations --out "$tasks"
only='main { display: grid; grid-template-columns: 610px 1fr; gap: 12px; max-width: none; padding: 12px }
  main > *, .note, #pair table { display: none }
  main > section:has(#heads), main > section:has(#pair) { display: block; margin: 0 }'
sed -i "s|</head>|<style>${only//$'\n'/}</style></head>|" "$tasks"
picture compose "$tasks" 1440 864 "sample=0&layer=1&query=7&key=5&head=1&theme=light"
