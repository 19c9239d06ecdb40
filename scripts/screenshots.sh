#!/usr/bin/env bash
# Writes the pictures of docs/explore.md from an explorer page.   scripts/screenshots.sh PAGE [folder]
# Needs Chromium. The page of the pictures is that of the first command in docs/explore.md.
set -euo pipefail
page=$(realpath "${1:?give an explorer page}")
folder=$(realpath "${2:-"$(dirname "$0")/../docs"}")
browser=$(command -v chromium || command -v chromium-browser || command -v google-chrome) || {
  echo "error: chromium is not installed" >&2
  exit 2
}
profile=$(mktemp -d)
trap 'rm -rf "$profile"' EXIT

picture() { # name, width, height, address after #
  HOME=$profile "$browser" --headless --no-sandbox --disable-gpu --hide-scrollbars --user-data-dir="$profile/data" \
    --window-size="$2,$3" --virtual-time-budget=10000 --screenshot="$folder/$1.png" "file://$page#$4" 2> "$profile/log" || {
    cat "$profile/log" >&2
    exit 1
  }
  echo "$folder/$1.png"
}

picture explore 1280 1560 "sample=0&layer=1&query=5&key=9&head=1&theme=light"
picture explore_dark 1280 1150 "sample=0&layer=1&query=5&key=9&head=1&theme=dark"
picture explore_phone 390 1000 "sample=0&layer=1&query=5&key=9&head=1&theme=light"
