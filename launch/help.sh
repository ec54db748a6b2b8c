# Sourced by the other scripts, with their options: where -h or --help is among them, prints the comment that the script
# begins with, and ends it.
for option; do
  if [[ $option == -h || $option == --help ]]; then
    sed -n '/^#!/d;/^#/!q;s/^# \{0,1\}//p' "launch/${0##*/}"
    exit
  fi
done
