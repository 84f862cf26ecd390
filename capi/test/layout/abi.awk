# capi/abi/abi.txt as a list of macros that layout_test.c, or a program of C++, defines.
/^(#|experimental )/ { next }
/;$/       { print "DECLARATION(" substr($0, 1, length($0) - 1) ")"; next }
/^[A-Z_0-9]+ = / {
  count = split($0, constants, "; ")
  for (i = 1; i <= count; ++i) {
    split(constants[i], words, " = ")
    print "CONSTANT(" words[1] ", " words[2] ")"
  }
  next
}
/ bytes$/  { owner = substr($1, 1, length($1) - 1); print "STRUCT(" owner ", " $2 ")"; next }
/^  [0-9]/ {
  count = split(substr($0, 3), members, "; ")
  for (i = 1; i <= count; ++i) {
    split(members[i], words, " ")
    name = substr(words[3], 1, length(words[3]) - 1)
    type = substr(members[i], index(members[i], ": ") + 2)
    print "MEMBER(" owner ", " name ", " words[1] ", " substr(words[2], 2) ", " type ")"
  }
  next
}
{ print "#error a line of abi.txt that is none of these: " $0 }
