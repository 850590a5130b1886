# private.awk - the implementation of memscale.h with its private functions within reach: none of them
# is static. With -v bodies=1 this is what tests/library.c compiles; without, private.h, which tests
# include: the same text with prototypes in the place of the functions. Functions begin in the first
# column and end with a brace there, as clang-format writes them.

function line(number) { # of the next line
    printf "#line %d \"memscale.h\"\n", number
}

/^#endif \/\/ MEMSCALE_H/ {
    print "#ifndef MEMSCALE_PRIVATE_H\n#define MEMSCALE_PRIVATE_H"
    print "#ifdef MEMSCALE_IMPLEMENTATION\n#error \"private.h is for programs that link the implementation\"\n#endif"
    print "#include \"memscale.h\"\n#define MEMSCALE_IMPLEMENTATION"
    public = 1
    line(NR + 1)
    next
}
!public || done { next }

# Functions in a header that others do not use, tables that each has: no warnings.
/^\/\/ >>base/ {
    print "#pragma GCC system_header"
    print "#ifdef __cplusplus\nextern \"C\" {\n#endif"
    line(NR)
    private = 1
}

/^#endif \/\/ MEMSCALE_IMPLEMENTATION/ {
    print "#ifdef __cplusplus\n}\n#endif"
    print
    print "#endif // MEMSCALE_PRIVATE_H"
    done = 1
    next
}

skipping {
    if (/^}/) {
        skipping = 0
        line(NR + 1)
    }
    next
}

private && head == "" && (/^static / && !/^static inline/ || /^MEMSCALE_(CUDA_)?API/) { begins = 1 }
begins || head != "" {
    head = head (head == "" ? "" : "\n") $0
    begins = 0
    if ($0 !~ /[{;]( *\/\/.*)?$/) { next }
    if (head ~ /\) \{$/) {
        sub(/^static /, "", head)
        if (!bodies) {
            sub(/ \{$/, ";", head)
            skipping = 1
        }
    }
    print head
    head = ""
    next
}

!bodies && /^MSI_NAME_FUNCTION\(/ { next }
{ print }
