# Turns the plain // comments of a header into Doxygen's, for scripts/api-docs.sh. The headers stay as they are.
#
#   // text          at the top of the file        -> \file
#   // text          before a declaration          -> /// text
#   int a;  // text  after one                     -> ///< text
#   // --- text ---  between groups of members     -> nothing

# Doxygen reads <...>, @, \ and # as commands; in our comments they are text. Text between backticks is left alone.
function escaped(text,    parts, count, i, result) {
  count = split(text, parts, "`")
  for (i = 1; i <= count; ++i) {
    if (i % 2 == 1 || i == count) gsub(/[<>@\\#&%]/, "\\\\&", parts[i])
    result = result (i > 1 ? "`" : "") parts[i]
  }
  return result
}

FNR == 1 { in_header = 1; opened = 0 }
/SPDX-License-Identifier/ { print ""; next }
in_header && /^\/\// {
  text = substr($0, 3)
  sub(/^ /, "", text)
  if (!opened) { printf "/// \\file\n/// "; opened = 1 } else printf "/// "
  # "Threading  Any thread." begins a paragraph; lines that are indented deeper continue it.
  if (match(text, /^(Threading|Memory|Errors|Main path)  +/)) {
    word = text
    sub(/  +.*/, "", word)
    printf "\n/// **%s** %s\n", word, escaped(substr(text, RLENGTH + 1))
    next
  }
  sub(/^ +/, "", text)
  print escaped(text)
  next
}
{ in_header = 0 }
/^ *\/\/ -+ .* -+$/ { print ""; next }
/^ *\/\/ / {
  match($0, /^ */)
  indent = substr($0, 1, RLENGTH)
  text = substr($0, RLENGTH + 4)
  if (text ~ /^(Pre|Errors|Cost|Threading): /) printf "%s///\n", indent
  print indent "/// " escaped(text)
  next
}
# After code. A // in a string would be taken for a comment; no public header has one, and a warning would show it.
/[;,{})] *\/\/ / && !/\/\/ (NOLINT|namespace )/ && !/#/ {
  at = index($0, "// ")
  print substr($0, 1, at - 1) "///< " escaped(substr($0, at + 3))
  next
}
{ print }
